// Attention before the first gemm of a chain: its partial results become rows of x.
#pragma once

#include <type_traits>

#include "kernels/attention/combine.cuh"
#include "kernels/gemm/fused_layer/ring.cuh"

namespace cpmcu::cuda::chain {

// Of row `row` that attention left to combine (attention/combine.cuh) kWidth columns of each lane,
// the warp's from `column` on, which are of one head. Little code: it runs once in a launch, so all
// of it comes from L2. Waits for attention.
template <int kWidth, bool kMaySumRuns, typename T>
__device__ __forceinline__ void combine_columns(uint32_t (&values)[kWidth / 2],
                                                const FusedLayerArgs& args,
                                                const AttentionArgs<T>& attention,
                                                const RowSplits& splits, int row, int column) {
  using Vector = std::conditional_t<kWidth == 4, float4, float2>;
  constexpr int kAtOnce = 16;  // partial results, of splits or of runs
  static_assert(kAtOnce % kSplitsTogether == 0);
  const int lane = threadIdx.x % 32, shift = kMaySumRuns ? splits.shift : 0;
  const Partials partials(attention.scratch, args.max_splits,
                          attention.tokens.num_tokens * attention.num_heads, args.head_dim);
  const int row_head = row * attention.num_heads + column / args.head_dim;
  const float2* states = partials.states + row_head;
  const int64_t stride = partials.num_rows * args.head_dim << shift;
  int first = splits.begin >> shift & -32;  // partial result
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
    if (first % 32 == 0) {  // here, so that the partial results are on their way
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
    // All weights are powers of two, so it does not matter whether they come before sums or after.
    const auto add_up = [&](auto constant) {
      constexpr int kParts = decltype(constant)::value;  // of a run
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

// Makes row 0 of x of the first gemm, as far as this block multiplies it, for the stages from the
// first on. By all multiplying warps.
template <typename Product, typename T>
__device__ __forceinline__ void combine_slice(char* shared, const Ring<Product>& ring,
                                              const FusedLayerArgs& args,
                                              const AttentionArgs<T>& attention) {
  constexpr int kBlockK = kW4BlockK;  // that of all that combine so
  const Share share(args.gemms[0]);
  const RowSplits splits(attention, 0);
  const int lane = threadIdx.x % 32, num_blocks = share.end - share.begin;
  const int first = dimension_at(lane * 2);
  const int num_columns = attention.num_heads * args.head_dim;
#pragma unroll 1
  for (int k = ptx::uniform_warp() * 64; k < num_blocks * kBlockK; k += kWarps * 64) {
    const int column = share.begin * kBlockK + k;
    uint32_t value[1] = {0};
    if (column < num_columns && splits.count == 1) {
      ptx::pdl_wait();
      value[0] = __ldcg(reinterpret_cast<const uint32_t*>(attention.out + column + first));
    } else if (column < num_columns) {
      combine_columns<2, false>(value, args, attention, splits, 0, column);
    }
    const int offset = k / kBlockK * Product::kRowsBytes + Product::row_offset(k % kBlockK + first);
    *reinterpret_cast<uint32_t*>(shared + offset) = value[0];
  }
  ptx::shared_copy_fence();  // the stages are the copy engine's again afterwards
  ptx::named_barrier<1, kThreads>();
  if (threadIdx.x < num_blocks) {
    ptx::mbarrier_arrive(ring.rows_in(ring.stage(threadIdx.x)));
  }
}

// Writes this block's part of all rows of `out`, once attention is done; `combined` counts warps.
template <int kWidth, typename T>
__device__ __forceinline__ void combine_rows(const FusedLayerArgs& args,
                                             const AttentionArgs<T>& attention, uint32_t combined) {
  constexpr int kColumns = 32 * kWidth;
  const int lane = threadIdx.x % 32, num_columns = attention.num_heads * args.head_dim;
  const int per_row = num_columns / kColumns, num_items = attention.tokens.num_tokens * per_row;
  int item = ptx::uniform_warp() * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (; item < num_items; item += kWarps * gridDim.x) {
    const int row = item / per_row, column = item % per_row * kColumns;
    const RowSplits splits(attention, row);
    if (splits.count == 1) continue;  // it is written already
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

}  // namespace cpmcu::cuda::chain
