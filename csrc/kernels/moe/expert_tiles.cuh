// Shared by the GEMMs of experts: which pairs a CTA multiplies, and how its warps' sums become y.
//
// A CTA owns 32 rows of one expert's W, two m16 tiles. Its warps share K and add their sums in warp
// order. If W is gated, rows 0 to 7 of an m16 tile are gate and rows 8 to 15 are up.
#pragma once

#include "core/launch.h"
#include "core/vec.cuh"
#include "kernels/gemm/x_rows.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/silu.cuh"
#include "kernels/moe/expert_gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kTileRows = 32;  // of W, for a CTA

struct ExpertArgs {
  const char* w;     // of expert 0
  int64_t stride;    // bytes from one expert to the next
  void* y;           // [P, width]
  const void* x;     // [P / pairs_per_x, K]
  const int* pairs;  // as in Routing
  const int* offsets;
  const int* active;
  const int* num_active;
  int pairs_per_x;
  int n, k, width;  // of W; columns of y
  bool gated, float_out;
  float alpha;  // multiplies the sums
};

// Up to 8 kGroups pairs of an expert. Lane (g, q) reads x of pair 8 group + g.
template <typename T, int kGroups>
struct PairRows {
  const int* pairs;
  int count;
  int rows[kGroups];  // element offset in x; -1: no pair

  __device__ __forceinline__ PairRows(const ExpertArgs& args, int first, int end)
      : pairs(args.pairs + first), count(min(8 * kGroups, end - first)) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int i = group * 8 + g;
      rows[group] = i < count ? pairs[i] / args.pairs_per_x * args.k : -1;
    }
  }
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

// Adds the warps' sums and writes y. All threads of the CTA call it.
template <typename T, int kGroups>
__device__ __forceinline__ void store_pairs(const ExpertArgs& args,
                                            const PairRows<T, kGroups>& rows,
                                            const float (&sums)[2][kGroups][4]) {
  __shared__ float partial[kWarps][8 * kGroups][16 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const auto sum_of = [&](int pair, int row) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) sum += partial[part][pair][row];
    return args.alpha * sum;
  };
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    __syncthreads();  // all threads have read `partial`
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!rows.has(group)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[warp][group * 8 + q * 2 + i % 2][g + i / 2 * 8] = sums[tile][group][i];
      }
    }
    __syncthreads();
    if (args.gated) {
      const int first = (blockIdx.x * 2 + tile) * 8;
      for (int i = threadIdx.x; i < 8 * rows.count; i += kThreads) {
        const float gate = sum_of(i / 8, i % 8), up = sum_of(i / 8, i % 8 + 8);
        store_y<T>(args, rows.pairs[i / 8], first + i % 8, silu(gate) * up);
      }
    } else {
      const int first = (blockIdx.x * 2 + tile) * 16;
      for (int i = threadIdx.x; i < 16 * rows.count; i += kThreads) {
        store_y<T>(args, rows.pairs[i / 16], first + i % 16, sum_of(i / 16, i % 16));
      }
    }
  }
}

// ---- launchers

ExpertArgs expert_args(const char* op, const ExpertRows& rows, int64_t n, bool gated) {
  check_rows(op, "x", rows.x);
  CHECK(rows.x.num_elements() <= INT32_MAX, "{}: x {} has more than 2^31 - 1 numbers", op,
        rows.x.shape_text());
  return {.w = nullptr,
          .stride = 0,
          .y = rows.y.data(),
          .x = rows.x.data(),
          .pairs = rows.routing.pairs,
          .offsets = rows.routing.offsets,
          .active = rows.routing.active,
          .num_active = rows.routing.num_active,
          .pairs_per_x = rows.pairs_per_x,
          .n = static_cast<int>(n),
          .k = static_cast<int>(rows.x.size(1)),
          .width = static_cast<int>(rows.y.size(1)),
          .gated = gated,
          .float_out = rows.y.dtype() == DType::kF32,
          .alpha = 1};
}

// Grid: (tiles of W, experts that may have pairs). The CTAs of experts without pairs end at once.
dim3 expert_grid(const ExpertRows& rows, int64_t n) {
  return dim3((n + kTileRows - 1) / kTileRows,
              std::min<int64_t>(rows.routing.num_experts, rows.y.size(0)));
}

// Calls f with the number of groups of 8 pairs for an expert that all tokens may have chosen.
template <typename F>
void dispatch_groups(const ExpertRows& rows, F&& f) {
  const int64_t num_tokens = rows.y.size(0) / rows.routing.top_k;
  dispatch_int<1, 2, 4, 8>("groups of pairs", row_groups(num_tokens), f);
}

}  // namespace
}  // namespace cpmcu::cuda
