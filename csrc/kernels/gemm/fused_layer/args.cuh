// What the parts of a chain of products (fused_layer_sm90.cu) know of it, and of each other.
#pragma once

#include "kernels/attention/tiles.cuh"
#include "kernels/gemm/fused_layer.h"
#include "kernels/gemm/w4a16_multiply.cuh"

namespace cpmcu::cuda::chain {

constexpr uint32_t kNotYet = 0xFFFFFFFF;  // NaN; instructions make 0x7FFFFFFF

// A sum that does not depend on the order of its terms: in units of 2^-8, and what is left of a
// term then in units of 2^-48. Up to 2^56, which is far beyond what a norm is asked for.
struct alignas(128) ExactSum {  // a cache line, or additions to neighbours wait for each other
  unsigned long long high, low;

  __device__ __forceinline__ void add(float term) {
    const float whole = floorf(term * 0x1p8f);
    atomicAdd(&high, static_cast<unsigned long long>(whole));
    atomicAdd(&low, static_cast<unsigned long long>(__fmaf_rn(whole, -0x1p-8f, term) * 0x1p48f));
  }
  __device__ __forceinline__ float value() const {
    return static_cast<float>(high) * 0x1p-8f + static_cast<float>(low) * 0x1p-48f;
  }
};

constexpr uint32_t kSummed = 64;  // no fewer than slices; divides 2^32

// What launches leave to the next one. Zero at first.
struct FusedState {
  // Of blocks that are done with what gemm i reads; a cache line each. Ever growing.
  uint32_t arrived[kMaxFusedGemms][32];
  uint32_t bases[kMaxFusedGemms];  // `arrived` before this launch
  uint32_t launches;
  ExactSum squares[2][kMaxFusedGemms][kMaxRows];  // by turns: one half is used, the other zeroed
  // Of many rows, the blocks whose sums of a tile have come; a cache line each. A launch that
  // counts comes from one multiple of kSummed to the next, whatever its slices.
  uint32_t summed[kMaxFusedGemms][kMaxFusedCtas][32];
};
static_assert(sizeof(FusedState) <= kFusedStateBytes);

// The blocks of W of a product, and how blocks of threads share them out.
struct Blocks {
  const char* blocks;   // [tiles][k_blocks] if W has 4 bits
  int tiles, k_blocks;  // tiles of 256 rows; a block has as many k as its product says
  int block_bytes;
  int slices, slice_blocks, longer_slices;
  int one_over_slices;  // in units of 2^-16, rounded up: divides small numbers
  int units;            // blocks of threads that have something to do

  __device__ __forceinline__ int over_slices(int v) const { return v * one_over_slices >> 16; }
};

struct alignas(64) Link : Blocks {
  TensorMap x_map, w_map;   // of W if it has 16 bits
  void* y;                  // [M, N]; gated: [M, N / 2]
  void* normed;             // [M, N]; null: no norm
  const void* norm_weight;  // [N]
  float alpha, beta;
  float inv_size, eps;  // of the norm that x is owed; inv_size 0: none
  int n;
  // Between the two times 16 stored rows that are added up together, in 16s: 1, or half a head if
  // rotary_kv follows.
  int apart = 1;
  bool bf16_scales, gated;
};

// rotary_kv behind the last gemm.
struct Rotary {
  void* k_cache;
  void* v_cache;
  const void* bias;
  const float* inv_freq;
  float attention_scaling;
  int num_heads, num_kv_heads;
  StepTokens tokens;
};

// Who combines what attention left, so that the first gemm can read it.
enum class Combines {
  kNobody,
  kEachItsSlice,  // of one row, straight into the ring: the same columns in several blocks
  kTogether,      // all blocks, to memory, and wait for one another
};

struct FusedLayerArgs {
  Link gemms[kMaxFusedGemms];
  Rotary rotary;
  FusedState* state;
  char* pieces;  // [units][slabs][groups][tiles of 16 rows][lanes] of 16 bytes
  int num_gemms, m;
  int min_units;  // of all gemms but the last
  Combines combines;
  int max_splits, head_dim;  // of attention
  Blocks following[kMaxFollowing];
  int num_following;
  int pace;  // cycles in which a block of threads fetches one ahead; 0: none
};

// Of kEachItsSlice, in blocks of k; each has a stage.
constexpr int kMaxCombinedBlocks = 8;

// What a block of threads multiplies of a gemm: packed blocks [begin, end) of the tiles `tile`,
// tile + gridDim.x, ...
struct Share {
  int tile, slice, begin, end;

  __device__ __forceinline__ explicit Share(const Blocks& of) {
    const int b = blockIdx.x;
    tile = of.over_slices(b);
    slice = b - tile * of.slices;
    begin = slice * of.slice_blocks + min(slice, of.longer_slices);
    end = begin + of.slice_blocks + (slice < of.longer_slices);
  }
};

}  // namespace cpmcu::cuda::chain
