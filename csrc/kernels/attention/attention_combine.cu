// attention_combine: combines the partial results of the splits of each token.
//
//   out[t, h] = sum_s acc[s] 2^(M[s] - M) / sum_s L[s] 2^(M[s] - M),  M = max_s M[s]
//
// Roofline: the partial results are read once from L2. With few tokens, latency dominates; a CTA
// then loads all splits at once.
//
// Schedule of a CTA (a part of the dimensions of one token and query head):
//   1. Each thread loads eight splits of four dimensions.
//   2. All warps load the states (M, L) of all splits and compute M and the sum.
//   3. Each thread adds its splits; the sums of eight splits meet in shared memory and are added in
//      order. decode.cuh defines the order.
//
// Surprising: a missing split adds exactly 0. Therefore neither max_splits nor the number of CTAs
// of a row (kParts) changes a bit of the result.
#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/attention/combine.cuh"
#include "kernels/attention/selected_splits.cuh"

namespace cpmcu::cuda {
namespace {

// A CTA has one token, one query head and 1 / kParts of the dimensions. A thread has four
// dimensions and every kGroups-th SplitParts. The sums of the SplitParts are added in order.
template <typename T, int kDim_, int kParts_, int kThreads_, bool kSinks_ = false>
struct CombineConfig {
  using Element = T;
  static constexpr bool kSinks = kSinks_;
  static constexpr int kDim = kDim_;
  static constexpr int kParts = kParts_;  // CTAs that share a token and query head
  static constexpr int kColumns = kDim / 4 / kParts;
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kThreads / kColumns;
  static constexpr int kSums = 32;  // maximum number of SplitParts whose sums fit shared memory
};

template <typename Config, typename Splits>
__global__ void __launch_bounds__(Config::kThreads)
    attention_combine_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                             int max_splits) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  __shared__ float4 sums[Config::kSums][Config::kColumns];
  extern __shared__ float2 states[];  // row maximum and sum of each split

  ptx::pdl_launch();  // early: the next kernel waits for this one anyway
  if constexpr (!Splits::kIsOld) ptx::pdl_wait();
  // NOTE: `splits` comes before `head`. In the other order, ptxas 13.0 gives the kernel fewer
  // registers.
  const Splits splits(args, blockIdx.y, static_cast<int>(blockIdx.x) / Config::kParts);
  const int head = static_cast<int>(blockIdx.x) / Config::kParts;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.num_heads + head;
  const int thread_column = static_cast<int>(threadIdx.x) % Config::kColumns;
  const int column =
      (static_cast<int>(blockIdx.x) % Config::kParts * Config::kColumns + thread_column) * 4;
  const Partials partials(args.scratch, max_splits, args.tokens.num_tokens * args.num_heads, kDim);
  const float* acc = partials.acc + row * kDim + column;
  const float2* row_states = partials.states + row;
  ptx::pdl_wait();
  if (Splits::kSkipsOne && splits.count == 1) return;  // attention_splits wrote the result

  const int num_sums = (splits.count + kSplitsTogether - 1) / kSplitsTogether;
  const int num_states = num_sums * kSplitsTogether;
  int at = static_cast<int>(threadIdx.x) / Config::kColumns;
  const bool adds_up = at == 0;
  SplitParts parts;
  auto load_parts = [&]() {
    if (at >= num_sums) return;
    parts.load(acc, partials.num_rows * kDim, at, splits);
  };
  load_parts();
  // The states of all splits, while the loads of the parts are in flight.
  for (int s = static_cast<int>(threadIdx.x); s < num_states; s += Config::kThreads) {
    const bool is_there = splits.has(s) && splits.partial(s) == s;
    states[s] = is_there ? row_states[s * partials.num_rows] : make_float2(kMinusInfinity, 0);
  }
  __syncthreads();
  const auto [row_max, sum] = row_max_and_sum(states, num_sums * kGroupsTogether);

  float total[4] = {};
  for (int first_sum = 0; first_sum < num_sums; first_sum += Config::kSums) {
    const int end_sum = min(first_sum + Config::kSums, num_sums);
    for (; at < end_sum; at += Config::kGroups, load_parts()) {
      float part_sum[4];
      parts.add_up(part_sum, states + at * kSplitsTogether, row_max);
      sums[at - first_sum][thread_column] = {part_sum[0], part_sum[1], part_sum[2], part_sum[3]};
    }
    __syncthreads();
    for (int i = 0; i < end_sum - first_sum && adds_up; ++i) {
      const float4 part_sum = sums[i][thread_column];
      total[0] = __fadd_rn(total[0], part_sum.x);
      total[1] = __fadd_rn(total[1], part_sum.y);
      total[2] = __fadd_rn(total[2], part_sum.z);
      total[3] = __fadd_rn(total[3], part_sum.w);
    }
    __syncthreads();
  }
  if (!adds_up) return;
  float all = sum;
  if constexpr (Config::kSinks) all = with_sink(all, args.sinks, head, row_max);
  const float inverse = inverse_of(all);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    *reinterpret_cast<uint32_t*>(args.out + row * kDim + dimension_at(column + i)) =
        pack2<T>(normalised(total[i], inverse), normalised(total[i + 1], inverse));
  }
}

// ---- launchers

template <typename T, int kDim, typename Splits, bool kSinks = false>
void launch_combine(const Context& ctx, const AttentionParams& params, int max_splits,
                    bool before_fused_layer) {
  const int num_rows = params.tokens.num_tokens;
  const auto combine = [&](auto config) {
    using Config = decltype(config);
    const auto kernel = attention_combine_kernel<Config, Splits>;
    const int sums = (max_splits + kSplitsTogether - 1) / kSplitsTogether;
    const size_t bytes = sums * kSplitsTogether * sizeof(float2);
    allow_shared_bytes(kernel, bytes + Config::kSums * Config::kColumns * sizeof(float4));
    launch(ctx, kernel, dim3(params.num_heads * Config::kParts, num_rows), Config::kThreads, bytes,
           make_decode_args<T>(ctx, params), max_splits);
  };
  // If tokens are few, a CTA loads all splits at once.
  using Few = CombineConfig<T, kDim, 4, 128, kSinks>;
  if (params.num_heads * num_rows >= ctx.sm_count) {
    combine(CombineConfig<T, kDim, kDim / 512 + 1, 128, kSinks>{});
  } else if (before_fused_layer) {
    combine(CombineConfig<T, kDim, 2, 320, kSinks>{});
  } else if (max_splits <= Few::kGroups * kSplitsTogether) {
    combine(Few{});
  } else {
    combine(CombineConfig<T, kDim, 4, 256, kSinks>{});
  }
}

// Graph-safe. Reads from the device: positions, or token_seqs, seq_slots, seq_token_begin and
// slot_lengths (see RowSplits).
void combine_splits(const Context& ctx, const AttentionParams& params, bool before_fused_layer) {
  const int max_splits = num_splits(params.tokens.max_kv);
  if (params.tokens.num_tokens == 0 || (params.selection.empty() && max_splits == 1)) return;
  if (is_combined_in_clusters(ctx, params)) return;
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    using T = decltype(element);
    if (!params.selection.empty()) {
      dispatch_int<64, 128>("attention_combine: head_dim", params.head_dim, [&](auto dim) {
        launch_combine<T, dim.value, SelectedSplits>(ctx, params, params.selection.max_splits,
                                                     before_fused_layer);
      });
      return;
    }
    if (!params.sinks.empty()) {
      dispatch_int<64, 128>("attention_combine with sinks: head_dim", params.head_dim,
                            [&](auto dim) {
                              launch_combine<T, dim.value, RowSplits, true>(ctx, params, max_splits,
                                                                            before_fused_layer);
                            });
      return;
    }
    dispatch_int<64, 128, 256, 512>("attention_combine: head_dim", params.head_dim, [&](auto dim) {
      launch_combine<T, dim.value, RowSplits>(ctx, params, max_splits, before_fused_layer);
    });
  });
}

}  // namespace

void attention_combine(const Context& ctx, const AttentionParams& params) {
  combine_splits(ctx, params, false);
}
void attention_combine_before_fused_layer(const Context& ctx, const AttentionParams& params) {
  combine_splits(ctx, params, true);
}

}  // namespace cpmcu::cuda
