// Attention of 1..64 rows of a sequence over the paged cache, split over the entries.
//
// Two kernels share the same arithmetic (decode.cuh) among warps in different ways, with the same
// bits: few_rows.cuh by entries, many_rows.cuh by rows.
//
// Surprising: the grid does not have a block for each split, but about as many blocks as run at a
// time. Each does a range of splits, one after another: what comes before the first entry and
// behind the last is paid once a range, and the copies run on over the ends of splits. Where ranges
// begin changes no bit, so the host may choose. Trees that have half a run a range get whole runs.
#include <algorithm>

#include "core/dispatch.h"
#include "kernels/attention/few_rows.cuh"
#include "kernels/attention/many_rows.cuh"

namespace cpmcu::cuda {
namespace {

// Up to so many packed rows of a KV head are few.
constexpr int kMaxFewRows = 16;
// With several sequences no block does more entries of one, or the longest would be waited for.
constexpr int kMaxRangeEntries = 4096;

// How rows and splits are shared out among blocks.
struct DecodeGrid {
  int num_chunks, num_split_ranges, max_splits;

  // So many ranges that about as many blocks come of it as run at a time.
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
  // From half a run a range on, though blocks have nothing to do then: more than that is gained
  // where partial results are combined. The longer runs are, the longer that is: three quarters
  // beyond 8192 entries, a whole one beyond 32768.
  int merge_from() const {
    const int whole = num_split_ranges * kSplitsPerGroup;
    int splits = whole / 2;
    if (splits > num_splits(8192)) splits += whole / 4;
    if (splits > num_splits(32768)) splits = whole;
    return splits <= max_splits ? splits : kNeverMerge;
  }
};

template <typename Config, typename Smem, typename Kernel>
void launch_splits(const Context& ctx, const AttentionParams& params, Kernel kernel) {
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a block");
  const DecodeGrid decode_grid = DecodeGrid::of<Config>(ctx, params);
  const dim3 grid(decode_grid.num_chunks * params.num_kv_heads, decode_grid.num_split_ranges,
                  params.tokens.num_seqs);
  // Where there is a multiprocessor for each block, so much that none takes two: they would be
  // slower.
  const size_t one_cta_bytes = std::max<size_t>(sizeof(Smem), ctx.sm_shared_bytes / 2);
  const int num_ctas = static_cast<int>(grid.x * grid.y * grid.z);
  allow_shared_bytes(kernel, one_cta_bytes);
  launch(ctx, kernel, grid, Config::kThreads,
         num_ctas <= ctx.sm_count ? one_cta_bytes : sizeof(Smem),
         make_decode_args<typename Config::Element>(ctx, params), decode_grid.num_chunks,
         decode_grid.max_splits);
}

template <typename T, int kDim>
void launch_all_splits(const Context& ctx, const AttentionParams& params) {
  using Few = FewRowsConfig<T, kDim>;
  using Many = ManyRowsConfig<T, kDim>;
  const int max_packed = params.tokens.max_seq_tokens * (params.num_heads / params.num_kv_heads);
  if (params.by_position) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, attention_many_rows_kernel<Many, true>);
  } else if (max_packed > kMaxFewRows) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, attention_many_rows_kernel<Many, false>);
  } else {
    launch_splits<Few, FewRowsSmem<Few>>(ctx, params, attention_few_rows_kernel<Few>);
  }
}

}  // namespace

int merges_from(const Context& ctx, const AttentionParams& params) {
  if (!params.by_position) return kNeverMerge;
  int from = kNeverMerge;
  dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
    using Many = ManyRowsConfig<__half, dim.value>;
    if constexpr (Many::kMerges) from = DecodeGrid::of<Many>(ctx, params).merge_from();
  });
  return from;
}

// Graph-safe: yes. Reads on the device: slots, row ranges, lengths, masks, page table.
void attention_splits(const Context& ctx, const AttentionParams& params) {
  const StepTokens& tokens = params.tokens;
  if (tokens.num_tokens == 0) return;
  check_attention(params, "attention_decode");
  CHECK(tokens.max_seq_tokens <= kMaxTreeSize,
        "attention_decode: a sequence may have up to {} rows, not {}", kMaxTreeSize,
        tokens.max_seq_tokens);
  CHECK(!params.by_position || (tokens.ancestor_masks != nullptr && tokens.first_token == 0),
        "attention_decode: by_position needs masks and a step in one launch, not first_token {}",
        tokens.first_token);
  const int64_t needed =
      attention_scratch_floats(tokens.num_tokens, params.num_heads, params.head_dim, tokens.max_kv);
  CHECK(num_splits(tokens.max_kv) == 1 ||
            (params.scratch.dtype() == DType::kF32 && params.scratch.num_elements() >= needed),
        "attention_decode: scratch is {} of {}, expected {} of float32",
        params.scratch.shape_text(), name_of(params.scratch.dtype()), needed);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
