// The arguments and the shared memory of gated_delta_net.cu.
#pragma once

#include "kernels/delta_net/delta_net_columns.cuh"
#include "kernels/step/tree_plan.cuh"

namespace cpmcu::cuda::delta_net {

constexpr int kWindow = kConvTaps - 1;
constexpr int kRawWidth = 3 * kDim;
constexpr int kPendingWidth = kRawWidth + 8;
// Sums of squares of this many stages of a prompt are kept. The CTAs of a head wait only for each
// other's sums, so a CTA is at most two stages ahead of another. So it never overwrites sums in
// use.
constexpr int kExchanges = 4;
// Index of the exchange of q and k in a decode step. Sums of squares then use exchange 0.
constexpr int kExchangeOfKeys = 1;

// Rows of shared memory.
struct Capacity {
  int rows;     // rows for prepared tokens
  int raws;     // rows for raw tokens, behind the three of the window
  int outputs;  // rows for the o of tokens
  int squares;  // rows for sums of squares of tokens, a multiple of 4
  int copies;   // copies of S, for the branches of a tree
};

template <typename T>
struct DeltaArgs {
  T* out;         // [T, Hv * 128]
  const T* qkvz;  // [T, row of the layout]
  const T* ba;    // [T, row of the layout]
  const T* conv;  // [channels, 4]
  const float* a_log;
  const float* dt_bias;
  const T* norm;  // [128]
  float eps;
  float* state;  // [slots, Hv, 16, 128 * 8]
  T* window;     // [slots, Hv, 3, 384]
  T* pending;    // [slots, Hv, pending_rows, 392]
  int* folded;   // [slots, Hv]
  Accepted accepted;
  DeltaLayout layout;
  int num_key_heads, num_value_heads;
  int pending_rows;
  Capacity capacity;
  bool accepts_all;
  StepTokens tokens;
};

// Addresses of q, k and v of a raw token; v begins at the CTA's columns.
template <typename T>
struct Raw {
  const T *q, *k, *v;
};

// Columns of the head's projections.
struct Places {
  int q, k, v, z, b, a;  // v and z: the first of the CTA's own columns
};

// The tokens that a CTA prepares: those of the step, or accepted ones. Both run the same code, so
// that it is in the instruction cache when the second run begins.
template <typename T>
struct Source {
  const T *rows, *gates;
  int row, gates_row;  // elements from one token to the next, in `rows` and `gates`
  Places places;
  const int* nodes;         // the pending token of each accepted one; read unless is_step
  const uint32_t* windows;  // window_of each node of a tree; null: the tokens follow one another
  bool is_step;

  __device__ __forceinline__ int node(int i) const { return is_step ? i : nodes[i]; }
  __device__ __forceinline__ uint32_t window(int i) const {
    return windows != nullptr ? windows[i] : window_of(i - 1, i - 2, i - 3);
  }
};

// The share of a head that a CTA computes, and its shared memory.
template <typename T, int kCtas>
struct Shared {
  static constexpr int kSplit = kCtas;
  static constexpr int kWidth = kDim / kSplit;  // columns of v that the CTA has
  // Columns of q and k, and the CTA's columns of v.
  static constexpr int kWindowWidth = 2 * kDim + kWidth;
  // Sums of squares of a token's o. In a cluster each sum is over 32 columns. So clusters of two
  // and of four CTAs, in prompts and steps, give the same bits.
  static constexpr int kParts = kSplit > 1 ? 4 : 1;

  TreePlan* tree;
  // [kExchanges]: a barrier completes when the data of all CTAs of the head have arrived.
  uint64_t* barriers;
  float* keys;      // [rows, 2, kKeyFloats]: q and k
  float* v;         // [rows, kWidth]
  float* o;         // [outputs, kWidth]
  float* copies;    // [copies, warps, kTileFloats]
  float* squares;   // [kSplit, squares, kParts / kSplit] sums of squares of o from each CTA
  T* window;        // [3 + raws, kWindowWidth] raw tokens: 3 before the step, then the step's
  float2* gates;    // [rows]: decay and beta
  int num_squares;  // equal to Capacity::squares

  __device__ __forceinline__ Shared(char* memory, const Capacity& capacity)
      : num_squares(capacity.squares) {
    const auto take = [&](int bytes) {
      char* const at = memory;
      memory += bytes;
      return at;
    };
    const auto floats = [&](int count) { return reinterpret_cast<float*>(take(count * 4)); };
    tree = reinterpret_cast<TreePlan*>(take(sizeof(TreePlan)));
    barriers = reinterpret_cast<uint64_t*>(take(kExchanges * sizeof(uint64_t)));
    keys = floats(capacity.rows * 2 * kKeyFloats);
    v = floats(capacity.rows * kWidth);
    o = floats(capacity.outputs * kWidth);
    copies = floats(capacity.copies * kDim * kWidth);
    squares = floats(kParts * capacity.squares);
    window = reinterpret_cast<T*>(take((kWindow + capacity.raws) * kWindowWidth * sizeof(T)));
    gates = reinterpret_cast<float2*>(memory);
  }
  static int64_t num_bytes(const Capacity& capacity) {
    const int64_t floats = capacity.rows * (2 + 2 * kKeyFloats + kWidth) +
                           capacity.outputs * kWidth + capacity.copies * kDim * kWidth +
                           kParts * capacity.squares;
    return sizeof(TreePlan) + kExchanges * sizeof(uint64_t) + floats * sizeof(float) +
           (kWindow + capacity.raws) * kWindowWidth * sizeof(T);
  }
};

}  // namespace cpmcu::cuda::delta_net
