// Common code of the GEMMs of experts: the pairs of a CTA, and the sums of its warps added to y.
//
// A warp has 32 rows of one expert's W, two m16 tiles. `splits` warps share the K of these rows,
// and their sums are added in warp order. If W is gated, rows 0 to 7 of an m16 tile are gate and
// rows 8 to 15 are up.
//
// PDL: the kernels trigger the next launch after their wait. So launches after one of these kernels
// begin when the routing is complete, also if another launch lies between (`routing_is_complete`).
// The second kernel of a layer then requests weights before its wait.
#pragma once

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/x_rows.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/clamped_swiglu.cuh"
#include "kernels/layer/silu.cuh"
#include "kernels/moe/expert_gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kTileRows = 32;  // rows of W that a warp has

struct ExpertArgs {
  const char* w;     // weights of expert 0
  int64_t stride;    // bytes from one expert to the next
  void* y;           // [P, width]
  const void* x;     // [P / pairs_per_x, K]
  const int* pairs;  // as in Routing
  const ExpertSpan* spans;
  uint32_t pairs_inverse;  // ceil(2^32 / pairs_per_x); 0: pairs_per_x is 1
  int n, k, width;         // W is [n, k]; y has `width` columns
  int split_bits;          // 2^split_bits warps share K: 1, 2, 4 or 8
  int partial_pairs;       // pairs for which store_pairs has room: at least those of one pass
  bool gated, float_out;
  bool routing_is_complete;  // the routing is complete before the kernel waits for the previous one
  float alpha;               // factor of the sums
  const void* bias;          // [E, n]; null: none
  bool swiglu;
  float swiglu_alpha, swiglu_limit;
};

// From L2: before the wait, L1 may hold the span of the layer before.
__device__ __forceinline__ ExpertSpan span_of(const ExpertArgs& args) {
  const int4 v = __ldcg(reinterpret_cast<const int4*>(args.spans + blockIdx.y));
  return {v.x, v.y, v.z, v.w};
}

// Up to 8 kGroups pairs of an expert, from number `first` of its span on. Lane (g, q) reads x of
// pair 8 group + g. If there is no such pair, the lane reads x of the last one: its column of the
// mma is not used.
template <int kGroups>
struct PairRows {
  const int* pairs;
  int count;
  int only;           // number of the only pair; -1: look it up in `pairs`
  int rows[kGroups];  // offset of each pair's row in x, in elements

  __device__ __forceinline__ PairRows(const ExpertArgs& args, const ExpertSpan& span, int first)
      : pairs(args.pairs + span.begin + first),
        count(min(8 * kGroups, span.count - first)),
        only(span.pair) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int of = pair(min(group * 8 + g, count - 1));
      // Exact, because P pairs_per_x is below 2^32.
      rows[group] = (args.pairs_inverse == 0 ? of : __umulhi(of, args.pairs_inverse)) * args.k;
    }
  }
  __device__ __forceinline__ int pair(int i) const { return only >= 0 ? only : pairs[i]; }
  // Whether the group has pairs; the same in all lanes.
  __device__ __forceinline__ bool has(int group) const { return group * 8 < count; }
};

template <typename T>
__device__ __forceinline__ void store_y(const ExpertArgs& args, int pair, int column, float value) {
  if (column >= args.width) return;
  const int64_t at = static_cast<int64_t>(pair) * args.width + column;
  if (args.float_out) {
    static_cast<float*>(args.y)[at] = value;
  } else {
    static_cast<T*>(args.y)[at] = from_float<T>(value);
  }
}

constexpr int kPartialStride = kTileRows + 1;  // floats from one pair to the next in a warp's sums
// Bytes of the shared memory of store_pairs.
constexpr int partial_bytes(int pairs) { return kWarps * pairs * kPartialStride * 4; }

// Adds the warps' sums and writes y. All threads of the CTA call it. `partial` has partial_bytes.
// `bias`: that of the CTA's first row and the rows after it; not read if there is none.
template <typename T, int kGroups>
__device__ __forceinline__ void store_pairs(const ExpertArgs& args, const PairRows<kGroups>& rows,
                                            const float (&sums)[2][kGroups][4], float* partial,
                                            const T* bias) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int warp_floats = args.partial_pairs * kPartialStride;
  __syncthreads();  // all threads have read `partial`
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (!rows.has(group)) continue;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int pair = group * 8 + q * 2 + odd;
      if (pair >= rows.count) continue;
      float* const to = partial + warp * warp_floats + pair * kPartialStride + g;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i * 8] = sums[i / 2][group][i % 2 * 2 + odd];
    }
  }
  __syncthreads();
  // Columns of y are in the order of a tile's rows of W. With an activation, a column has two rows.
  const int tile_bits = args.gated || args.swiglu ? 4 : 5;
  const int column_bits = 3 - args.split_bits + tile_bits;  // log2 of a CTA's columns
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.count << column_bits; i += kThreads) {
    const int pair = i >> column_bits, column = i & ((1 << column_bits) - 1);
    const int tile = column >> tile_bits, in_tile = column & ((1 << tile_bits) - 1);
    const float* from = partial + (tile << args.split_bits) * warp_floats + pair * kPartialStride;
    const auto sum_of = [&](int row) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part >> args.split_bits == 0) sum += from[part * warp_floats + row];
      }
      return args.alpha * sum;
    };
    float value;
    if (args.gated) {
      const int row = in_tile / 8 * 16 + in_tile % 8;
      value = silu(sum_of(row)) * sum_of(row + 8);
    } else if (args.swiglu) {
      const auto rounded = [&](int row) {
        return to_float(from_float<T>(sum_of(row))) + to_float(bias[tile * kTileRows + row]);
      };
      value = clamped_swiglu(rounded(2 * in_tile), rounded(2 * in_tile + 1), args.swiglu_alpha,
                             args.swiglu_limit);
    } else {
      value = sum_of(in_tile);
      if (args.bias != nullptr) value += to_float(bias[tile * kTileRows + in_tile]);
    }
    store_y<T>(args, rows.pair(pair), (blockIdx.x << column_bits) + column, value);
  }
}

// Writes y of a warp tile whose sums lie in one warp: sums of rows g and g + 8 of its m16 tiles,
// for the pairs 2 q and 2 q + 1. All lanes call it. `bias`: of the tile's first row; not read if
// there is none. The bits are those of store_pairs.
template <typename T>
__device__ __forceinline__ void store_tile(const ExpertArgs& args, const PairRows<1>& rows,
                                           const float (&first)[4], const float (&second)[4],
                                           int tile, const T* bias) {
  // Else nvcc computes addresses before the main loop and spills them.
  const int lane = ptx::volatile_lane();
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const bool exists = q * 2 + odd < rows.count;
    const int pair = exists ? rows.pair(q * 2 + odd) : 0;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float (&sums)[4] = t == 0 ? first : second;
      const float values[2] = {args.alpha * sums[odd], args.alpha * sums[2 + odd]};
      if (args.gated) {
        const float value = silu(values[0]) * values[1];
        if (exists) store_y<T>(args, pair, tile * (kTileRows / 2) + t * 8 + g, value);
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = t * 16 + half * 8 + g;
        if (args.swiglu) {  // an even row is gate, the next one is up
          const float own = to_float(from_float<T>(values[half])) + to_float(bias[row]);
          const float up = __shfl_down_sync(0xffffffffu, own, 4);
          if (!exists || g % 2 != 0) continue;
          store_y<T>(args, pair, (tile * kTileRows + row) / 2,
                     clamped_swiglu(own, up, args.swiglu_alpha, args.swiglu_limit));
        } else if (exists) {
          float value = values[half];
          if (args.bias != nullptr) value += to_float(bias[row]);
          store_y<T>(args, pair, tile * kTileRows + row, value);
        }
      }
    }
  }
}

// ---- launchers

// `pass_pairs`: pairs that the kernel multiplies at a time.
ExpertArgs expert_args(const char* op, const ExpertRows& rows, int64_t n, int split_bits,
                       bool gated, int pass_pairs) {
  check_rows(op, "x", rows.x);
  CHECK(is_aligned16(rows.bias.data()), "{}: the bias is not aligned to 16 bytes", op);
  CHECK(rows.x.num_elements() <= INT32_MAX, "{}: x {} has more than 2^31 - 1 numbers", op,
        rows.x.shape_text());
  // An expert has at most one pair of each token.
  const int64_t num_tokens = rows.y.size(0) / rows.routing.top_k;
  return {.w = nullptr,
          .stride = 0,
          .y = rows.y.data(),
          .x = rows.x.data(),
          .pairs = rows.routing.pairs,
          .spans = rows.routing.spans,
          .pairs_inverse = rows.pairs_per_x == 1
                               ? 0
                               : static_cast<uint32_t>(((int64_t{1} << 32) + rows.pairs_per_x - 1) /
                                                       rows.pairs_per_x),
          .n = static_cast<int>(n),
          .k = static_cast<int>(rows.x.size(1)),
          .width = static_cast<int>(rows.y.size(1)),
          .split_bits = split_bits,
          .partial_pairs = static_cast<int>(std::min<int64_t>(num_tokens, pass_pairs)),
          .gated = gated,
          .float_out = rows.y.dtype() == DType::kF32,
          .routing_is_complete = rows.routing_is_complete,
          .alpha = 1,
          .bias = rows.bias.data(),
          .swiglu = rows.swiglu_limit > 0,
          .swiglu_alpha = rows.swiglu_alpha,
          .swiglu_limit = rows.swiglu_limit};
}

// Grid: (CTAs of W, experts that may have pairs). The CTAs of experts without pairs end at once.
dim3 expert_grid(const ExpertRows& rows, int64_t n, int split_bits) {
  const int64_t cta_rows = kTileRows * (kWarps >> split_bits);
  return dim3((n + cta_rows - 1) / cta_rows,
              std::min<int64_t>(rows.routing.num_experts, rows.y.size(0)));
}

}  // namespace
}  // namespace cpmcu::cuda
