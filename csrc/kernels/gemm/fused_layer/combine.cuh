// Combination of attention splits into x of the first GEMM (arithmetic:
// kernels/attention/combine.cuh).
#pragma once

#include <type_traits>

#include "kernels/attention/combine.cuh"
#include "kernels/gemm/fused_layer/ring.cuh"

namespace cpmcu::cuda::fused {

// Combines the splits of row `row` in 32 * kWidth columns of one head, from `column` on; kWidth
// columns a lane. The code is short, because it runs once a launch and is fetched from L2. Calls
// pdl_wait() before it reads partial results.
template <int kWidth, bool kMaySumRuns, typename T>
__device__ __forceinline__ void combine_columns(uint32_t (&values)[kWidth / 2],
                                                const FusedLayerArgs& args,
                                                const AttentionArgs<T>& attention,
                                                const RowSplits& splits, int row, int column) {
  using Vector = std::conditional_t<kWidth == 4, float4, float2>;
  constexpr int kAtOnce = 16;  // partial results: splits, or split groups if kMaySumRuns
  static_assert(kAtOnce % kSplitsTogether == 0);
  const int lane = threadIdx.x % 32, shift = kMaySumRuns ? splits.shift : 0;
  const Partials partials(attention.scratch, args.max_splits,
                          attention.tokens.num_tokens * attention.num_heads, args.head_dim);
  const int row_head = row * attention.num_heads + column / args.head_dim;
  const float2* states = partials.states + row_head;
  const int64_t stride = partials.num_rows * args.head_dim << shift;
  int first = splits.begin >> shift & -32;  // index of a partial result
  const float* acc = partials.acc + first * stride + int64_t{row_head} * args.head_dim +
                     column % args.head_dim + lane * kWidth;
  const auto has = [&](int i) { return splits.has(i << shift); };
  const auto state_of = [&](int i) {
    return has(i) ? states[(i << shift) * partials.num_rows] : make_float2(kMinusInfinity, 0);
  };
  float reference = kMinusInfinity, sum = 0, weight = 0;
  float total[kWidth] = {};
  ptx::pdl_wait();
  bool is_first = true;
#pragma unroll 1
  for (; first << shift < splits.count; first += kAtOnce, is_first = false) {
    float part[kAtOnce][kWidth] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, acc += stride) {
      if (!has(first + i)) continue;
      *reinterpret_cast<Vector*>(part[i]) = *reinterpret_cast<const Vector*>(acc);
    }
    if (first % 32 == 0) {  // after the loads above, so that they are in flight
      const float2 state = state_of(first + lane);
      if (is_first) {
        reference = state.x;
#pragma unroll 1
        for (int i = first + 32 + lane; i << shift < splits.count; i += 32) {
          reference = fmaxf(reference, state_of(i).x);
        }
        reference = warp_reduce(reference, Max{});
      }
      weight = weight_of(state.x, reference);
      sum = add_split_groups(sum, __fmul_rn(state.y, weight), shift > 0);
    }
    const int lane_of_first = first % 32;
    const auto weight_of_part = [&](int i) {
      return __shfl_sync(0xffffffffu, weight, lane_of_first + i);
    };
    // All weights are powers of two, so scaling before or after an addition gives the same bits.
    const auto add_up = [&](auto constant) {
      constexpr int kParts = decltype(constant)::value;  // splits of a group
#pragma unroll
      for (int i = 0; i < kAtOnce; i += kGroupsTogether * kParts) {
        float together[kWidth];
#pragma unroll
        for (int run = 0; run < kGroupsTogether; ++run) {
          float run_sum[kWidth] = {};
#pragma unroll
          for (int k = i + run * kParts; k < i + (run + 1) * kParts; ++k) {
            const float its_weight = weight_of_part(k);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
              run_sum[j] = __fmaf_rn(part[k][j], its_weight, run_sum[j]);
            }
          }
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            together[j] = run == 0 ? run_sum[j] : __fadd_rn(together[j], run_sum[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] = __fadd_rn(total[j], together[j]);
      }
    };
    if (shift == 0) {
      add_up(std::integral_constant<int, kSplitsPerGroup>{});
    } else {
      add_up(std::integral_constant<int, 1>{});
    }
  }
  sum = sum_of_split_groups(sum, shift > 0);
  const float inverse = inverse_of(sum);
#pragma unroll
  for (int j = 0; j < kWidth; j += 2) {
    values[j / 2] = pack2<T>(normalised(total[j], inverse), normalised(total[j + 1], inverse));
  }
}

// Writes this CTA's slice of row 0 of x of the first GEMM into its first stages. By all consumer
// warps.
template <typename Mainloop, typename T>
__device__ __forceinline__ void combine_slice(char* shared, const Ring<Mainloop>& ring,
                                              const FusedLayerArgs& args,
                                              const AttentionArgs<T>& attention) {
  constexpr int kBlockK = kPackedK;  // only mainloops with this k block combine a slice
  const CtaRange range(args.parts[0]);
  const RowSplits splits(attention, 0);
  const int lane = threadIdx.x % 32, num_blocks = range.end - range.begin;
  const int first = dimension_at(lane * 2);
  const int num_columns = attention.num_heads * args.head_dim;
#pragma unroll 1
  for (int k = ptx::uniform_warp() * 64; k < num_blocks * kBlockK; k += kWarps * 64) {
    const int column = range.begin * kBlockK + k;
    uint32_t value[1] = {0};
    if (column < num_columns && splits.count == 1) {
      ptx::pdl_wait();
      value[0] = __ldcg(reinterpret_cast<const uint32_t*>(attention.out + column + first));
    } else if (column < num_columns) {
      combine_columns<2, false>(value, args, attention, splits, 0, column);
    }
    const int offset =
        k / kBlockK * Mainloop::kRowsBytes + Mainloop::row_offset(k % kBlockK + first);
    *reinterpret_cast<uint32_t*>(shared + offset) = value[0];
  }
  if constexpr (Mainloop::Copies::kEngine) {
    ptx::shared_copy_fence();  // before TMA writes these stages again
    ptx::named_barrier<1, kThreads>();
    if (threadIdx.x < num_blocks) {
      ptx::mbarrier_arrive(ring.rows_in(ring.stage(threadIdx.x)));
    }
  } else {
    ptx::named_barrier<1, kThreads>();
    for (int i = ptx::uniform_warp(); i < num_blocks; i += kWarps) {
      ptx::mbarrier_arrive(ring.rows_in(ring.stage(i)));
    }
  }
}

// Combines and writes this CTA's part of x for all tokens. Each consumer warp arrives at
// `combined`.
template <int kWidth, typename T>
__device__ __forceinline__ void combine_rows(const FusedLayerArgs& args,
                                             const AttentionArgs<T>& attention, uint32_t combined) {
  constexpr int kColumns = 32 * kWidth;
  const int lane = threadIdx.x % 32, num_columns = attention.num_heads * args.head_dim;
  const int chunks_per_row = num_columns / kColumns;
  const int num_chunks = attention.tokens.num_tokens * chunks_per_row;
  int chunk = ptx::uniform_warp() * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (; chunk < num_chunks; chunk += kWarps * gridDim.x) {
    const int row = chunk / chunks_per_row, column = chunk % chunks_per_row * kColumns;
    const RowSplits splits(attention, row);
    if (splits.count == 1) continue;  // one split: x is already written
    uint32_t values[kWidth / 2];
    combine_columns<kWidth, true>(values, args, attention, splits, row, column);
    T* to = attention.out + int64_t{row} * num_columns + column;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      *reinterpret_cast<uint32_t*>(to + dimension_at(lane * kWidth + i)) = values[i / 2];
    }
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(combined);
}

}  // namespace cpmcu::cuda::fused
