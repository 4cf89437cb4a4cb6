// The end of fused_experts: the sum over a token's experts, and the next norm.
#pragma once

#include "kernels/moe/fused_experts/args.cuh"

namespace cpmcu::cuda {
namespace {

namespace fused_experts_parts {

// Adds the ranks of the tokens to the CTA's own numbers of the residual stream, as moe_combine, and
// sends the sums of squares of 8 numbers each. `old`: the thread's number before.
template <bool kOne, typename T>
__device__ __forceinline__ void add_ranks(const FusedExpertsArgs& args, const Routing& routing,
                                          int round, const float* results, float* owned, float old,
                                          uint32_t launch) {
  const int token = threadIdx.x / kOwnRows, row = threadIdx.x % kOwnRows;
  const int column = own_column(round);
  float value = 0;
  if (token < args.tokens<kOne>() && column < args.k) {
    float sum = 0;
    for (int rank = 0; rank < args.top_k; ++rank) {
      const int pair = token * args.top_k + rank;
      const float* from = results + result_place(args, pair, 0) + row;
      float y = 0;
      for (int split = 0; split < args.down.splits; ++split) y += from[split * kOwnRows];
      sum = __fmaf_rn(routing.weights[pair], args.alpha * y, sum);
    }
    const T rounded = from_float<T>(__fmaf_rn(args.scale, sum, old));
    static_cast<T*>(args.hidden)[token * args.k + column + row] = rounded;
    value = to_float(rounded);
    owned[(round * args.tokens<kOne>() + token) * kOwnRows + row] = value;
  }
  if (args.normed == nullptr) return;
  // Lane 0 or 8 of 16 adds 8 squares in the order of rms_norm.
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float v = __shfl_sync(0xffffffffu, value, threadIdx.x % 32 / 8 * 8 + j);
    sum += v * v;
  }
  if (token < args.tokens<kOne>() && column < args.k && row % 8 == 0) {
    ptx::store_relaxed8(args.squares + (token * args.k + column + row) / 8,
                        message(launch, __float_as_uint(sum)));
  }
}

// Norms the CTA's own numbers by the squares of all, in the order of additions of rms_norm.
template <bool kOne, typename T>
__device__ __forceinline__ void norm_own(const FusedExpertsArgs& args, const float* owned,
                                         float (&sums)[kNormedRows][32], uint32_t launch) {
  static_assert(kVirtual<kCtaWarps> == 1, "a thread has at most one sum of squares of a row");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = threadIdx.x;
  const int row = lane % kOwnRows, first_column = own_column(lane / kOwnRows) + row;
  float weight = 0;  // of the first rounds, loaded while squares are in flight
  if (first_column < args.k)
    weight = to_float(static_cast<const T*>(args.next_weight)[first_column]);
#pragma unroll 1
  for (int token = 0; token < args.tokens<kOne>(); ++token) {
    uint64_t sent = 0;
    if (thread < args.k / 8) {
      do {
        sent = ptx::load_relaxed8(args.squares + token * (args.k / 8) + thread);
      } while (!is_of(sent, launch));
    }
    const float sum = warp_reduce(__uint_as_float(static_cast<uint32_t>(sent)), Sum());
    if (lane == 0) sums[token][warp] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int token = warp; token < args.tokens<kOne>(); token += kCtaWarps) {
    const float all = warp_reduce(lane < args.norm.warps ? sums[token][lane] : 0.0f, Sum());
    const float scale = rsqrtf(all / static_cast<float>(args.k) + args.next_eps);
    for (int round = lane / kOwnRows; round < args.rounds; round += 2) {
      const int column = own_column(round) + row;
      if (column >= args.k) continue;
      if (round >= 2) weight = to_float(static_cast<const T*>(args.next_weight)[column]);
      const float value = owned[(round * args.tokens<kOne>() + token) * kOwnRows + row];
      static_cast<T*>(args.normed)[token * args.k + column] =
          from_float<T>(value * scale * (weight + args.next_offset));
    }
  }
}

}  // namespace fused_experts_parts

}  // namespace
}  // namespace cpmcu::cuda
