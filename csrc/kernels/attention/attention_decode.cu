// attention_decode: attention of 1..64 tokens of a sequence over the paged cache, split over the
// entries.
//
// Roofline: K and V are read once from HBM: 4 * entries * Hkv * D bytes of 16-bit elements for a
// sequence, 2 * entries * Hkv * (D + 4) of an fp8 cache.
//
// Schedule: the kernels have the same arithmetic (decode.cuh) and the same bits.
//   few_rows.cuh   up to 16 packed rows: the warps of a CTA share the entries
//   many_rows.cuh  more rows, and all verified trees: the warps of a CTA share the rows
// Heads of 512 have a kernel of their own, attention_decode_wide.cu.
// Then attention_combine.cu combines the splits.
//
// Surprising: the grid does not have one CTA for each split. It has about as many CTAs as run at a
// time, and each CTA takes a range of splits. A range has one prologue and one epilogue, and copies
// continue across the ends of splits. The ranges change no bit of the result, so the host may
// choose them. If split groups are merged (merge_from), a range has whole split groups.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/layer/rotary.cuh"

namespace cpmcu::cuda {

#ifdef CPMCU_SM90
void attention_splits_cluster_sm90(const Context& ctx, const AttentionParams& params, bool rotates);
#endif
void attention_splits_fp8(const Context& ctx, const AttentionParams& params);
void attention_splits_fp8_sinks(const Context& ctx, const AttentionParams& params);
void attention_splits_sinks(const Context& ctx, const AttentionParams& params);
void attention_splits_rotary(const Context& ctx, const AttentionParams& params);
void attention_splits_wide(const Context& ctx, const AttentionParams& params);

int merges_from(const Context& ctx, const AttentionParams& params) {
  if (!params.by_position || params.head_dim == 512) return kNeverMerge;
  int from = kNeverMerge;
  dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
    using Many = ManyRowsConfig<__half, dim.value>;
    if constexpr (Many::kMerges) from = DecodeGrid::of<Many>(ctx, params).merge_from();
  });
  return from;
}

bool is_combined_in_clusters([[maybe_unused]] const Context& ctx,
                             [[maybe_unused]] const AttentionParams& params) {
#ifdef CPMCU_SM90
  // All splits of a KV head are in a cluster, and all clusters run at a time.
  const StepTokens& tokens = params.tokens;
  const int splits = num_splits(tokens.max_kv), rows = params.num_heads * tokens.max_seq_tokens;
  return ctx.compute_capability == 90 && !params.leaves_combine && splits > 1 &&
         splits <= kMaxClusterSplits && rows <= kMaxClusterRows * params.num_kv_heads &&
         !params.by_position && params.window == 0 && params.selection.empty() &&
         params.sinks.empty() && params.k_scales.empty() &&
         (params.head_dim == 64 || params.head_dim == 128) &&
         params.num_kv_heads * tokens.num_seqs * cluster_size_of(splits) <= ctx.sm_count;
#else
  return false;
#endif
}

// Whether the kernel applies rotary_kv itself.
static bool rotates(const AttentionParams& params) {
  static_assert(kMaxRotatedHeads == kMaxFewRows);
  return !params.rotary.qkv.empty() && can_rotate(params.rotary) &&
         params.tokens.max_seq_tokens == 1 && !params.by_position && params.sinks.empty();
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
  CHECK(params.rotary.qkv.empty() || params.selection.empty(),
        "attention_decode: rotary_kv and a selection are given, expected one of them");
  if (!params.selection.empty()) return sparse_decode(ctx, params);
  const bool rotates_itself = rotates(params);
  if (rotates_itself) {
    check_rotary_kv(params.rotary);
  } else if (!params.rotary.qkv.empty()) {
    cuda::rotary_kv(ctx, params.rotary);
  }
  const int64_t needed =
      attention_scratch_floats(tokens.num_tokens, params.num_heads, params.head_dim, tokens.max_kv);
  CHECK(num_splits(tokens.max_kv) == 1 ||
            (params.scratch.dtype() == DType::kF32 && params.scratch.num_elements() >= needed),
        "attention_decode: scratch is {} {}, expected {} elements of float32",
        params.scratch.shape_text(), name_of(params.scratch.dtype()), needed);
#ifdef CPMCU_SM90
  if (is_combined_in_clusters(ctx, params)) {
    return attention_splits_cluster_sm90(ctx, params, rotates_itself);
  }
#endif
  if (rotates_itself) return attention_splits_rotary(ctx, params);
  if (params.head_dim == 512) return attention_splits_wide(ctx, params);
  const bool is_fp8 = !params.k_scales.empty();
  if (!params.sinks.empty()) {
    return is_fp8 ? attention_splits_fp8_sinks(ctx, params) : attention_splits_sinks(ctx, params);
  }
  if (is_fp8) return attention_splits_fp8(ctx, params);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value, false>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
