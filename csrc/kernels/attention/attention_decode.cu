// attention_decode: attention of 1..64 tokens of a sequence over the paged cache, split over the
// entries.
//
// Roofline: K and V are read once from HBM: 4 * entries * Hkv * D bytes of 16-bit elements for a
// sequence.
//
// Schedule: the kernels have the same arithmetic (decode.cuh) and the same bits.
//   few_rows.cuh   up to 16 packed rows: the warps of a CTA share the entries
//   many_rows.cuh  more rows, and all verified trees: the warps of a CTA share the rows
// Then attention_combine.cu combines the splits.
//
// Surprising: the grid does not have one CTA for each split. It has about as many CTAs as run at a
// time, and each CTA takes a range of splits. A range has one prologue and one epilogue, and copies
// continue across the ends of splits. The ranges change no bit of the result, so the host may
// choose them. If split groups are merged (merge_from), a range has whole split groups.
#include <algorithm>

#include "core/dispatch.h"
#include "kernels/attention/few_rows.cuh"
#include "kernels/attention/many_rows.cuh"
#include "kernels/attention/selected_splits.cuh"

namespace cpmcu::cuda {
namespace {

// Maximum packed rows of a KV head for few_rows.cuh.
constexpr int kMaxFewRows = 16;
// Maximum entries of a range if there are several sequences. Otherwise the longest sequence would
// finish last, alone.
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

template <typename Config, typename Smem, typename Kernel>
void launch_splits(const Context& ctx, const AttentionParams& params, Kernel kernel) {
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const DecodeGrid decode_grid = DecodeGrid::of<Config>(ctx, params);
  const dim3 grid(decode_grid.num_chunks * params.num_kv_heads, decode_grid.num_split_ranges,
                  params.tokens.num_seqs);
  // If every CTA can have an SM of its own, each CTA asks for more than half of the SM's shared
  // memory. Two CTAs on one SM would be slower.
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

// Graph-safe. Reads from the device: seq_slots, seq_token_begin, slot_lengths, ancestor_masks,
// page_table.
void attention_splits(const Context& ctx, const AttentionParams& params) {
  const StepTokens& tokens = params.tokens;
  if (tokens.num_tokens == 0) return;
  check_attention(params, "attention_decode");
  CHECK(tokens.max_seq_tokens <= kMaxTreeSize,
        "attention_decode: a sequence may have up to {} tokens, not {}", kMaxTreeSize,
        tokens.max_seq_tokens);
  CHECK(!params.by_position || (tokens.ancestor_masks != nullptr && tokens.first_token == 0),
        "attention_decode: by_position needs ancestor_masks and first_token 0; first_token is {}",
        tokens.first_token);
  if (!params.selection.empty()) return sparse_decode(ctx, params);
  const int64_t needed =
      attention_scratch_floats(tokens.num_tokens, params.num_heads, params.head_dim, tokens.max_kv);
  CHECK(num_splits(tokens.max_kv) == 1 ||
            (params.scratch.dtype() == DType::kF32 && params.scratch.num_elements() >= needed),
        "attention_decode: scratch is {} {}, expected {} elements of float32",
        params.scratch.shape_text(), name_of(params.scratch.dtype()), needed);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
