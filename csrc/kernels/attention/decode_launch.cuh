// Launches of the attention_decode kernels. attention_decode.cu and attention_decode_fp8.cu compile
// them, each for one kind of cache.
#pragma once

#include <algorithm>

#include "kernels/attention/few_rows.cuh"
#include "kernels/attention/many_rows.cuh"

namespace cpmcu::cuda {
namespace {

// few_rows.cuh takes at most this many packed rows of a KV head. A packed row is one query head of
// one token.
constexpr int kMaxFewRows = 16;
// If there are several sequences, the longest has at least one range of splits for this many KV
// entries. With fewer ranges it would finish last, alone.
constexpr int kMaxRangeEntries = 4096;

// The division of packed rows and splits among CTAs.
struct DecodeGrid {
  int num_chunks, num_split_ranges, max_splits;

  // Chooses the number of ranges so that about as many CTAs exist as run at a time.
  template <typename Config>
  static DecodeGrid of(const Context& ctx, const AttentionParams& params) {
    const StepTokens& tokens = params.tokens;
    const int group = params.num_heads / params.num_kv_heads;
    const int num_chunks = (tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
    const int ctas_per_range = num_chunks * params.num_kv_heads * tokens.num_seqs;
    int num_split_ranges = Config::kCtasPerSm * ctx.sm_count / ctas_per_range;
    if (tokens.num_seqs > 1)
      num_split_ranges = std::max(num_split_ranges, tokens.max_kv / kMaxRangeEntries);
    const int max_splits = num_splits(tokens.max_kv);
    return {num_chunks, std::clamp(num_split_ranges, 1, max_splits), max_splits};
  }
  // Minimum number of splits for merging split groups: half a group for each range. Some CTAs are
  // then idle, but the faster combination saves more time. Longer splits need a higher minimum: 3/4
  // of a group beyond 8192 entries, a whole group beyond 32768.
  int merge_from() const {
    const int whole = num_split_ranges * kSplitsPerGroup;
    int splits = whole / 2;
    if (splits > num_splits(8192)) splits += whole / 4;
    if (splits > num_splits(32768)) splits = whole;
    return splits <= max_splits ? splits : kNeverMerge;
  }
};

template <typename Config, typename Smem, typename Kernel, typename... Args>
void launch_splits(const Context& ctx, const AttentionParams& params, Kernel kernel,
                   const Args&... args) {
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const DecodeGrid decode_grid = DecodeGrid::of<Config>(ctx, params);
  const dim3 grid(decode_grid.num_chunks * params.num_kv_heads, decode_grid.num_split_ranges,
                  params.tokens.num_seqs);
  // If every CTA can have an SM of its own, each CTA asks for more than half of the SM's shared
  // memory. Two CTAs on one SM would be slower.
  // With rotary_kv, the kernel follows the qkv GEMM and must fit beside it (kMoreShared in
  // gemm/packed/kernel.cuh), so that its loads start early.
  constexpr bool kFollowsGemm = requires { requires Config::kRotary; };
  const size_t one_cta_bytes = std::max<size_t>(sizeof(Smem), ctx.sm_shared_bytes / 2);
  const int num_ctas = static_cast<int>(grid.x * grid.y * grid.z);
  allow_shared_bytes(kernel, one_cta_bytes);
  launch(ctx, kernel, grid, Config::kThreads,
         !kFollowsGemm && num_ctas <= ctx.sm_count ? one_cta_bytes : sizeof(Smem),
         make_decode_args<typename Config::Element>(ctx, params), decode_grid.num_chunks,
         decode_grid.max_splits, args...);
}

template <typename T, int kDim, bool kFp8, bool kSinks = false>
void launch_all_splits(const Context& ctx, const AttentionParams& params) {
  using Few = FewRowsConfig<T, kDim, kFp8, kSinks>;
  using Many = ManyRowsConfig<T, kDim, kFp8, kSinks>;
  const int max_packed = params.tokens.max_seq_tokens * (params.num_heads / params.num_kv_heads);
  if (params.by_position) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, attention_many_rows_kernel<Many, true>);
  } else if (max_packed > kMaxFewRows) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, attention_many_rows_kernel<Many, false>);
  } else {
    launch_splits<Few, FewRowsSmem<Few>>(ctx, params, attention_few_rows_kernel<Few>, Nothing{});
  }
}

}  // namespace
}  // namespace cpmcu::cuda
