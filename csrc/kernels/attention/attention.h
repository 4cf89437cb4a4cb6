// Attention of a step's tokens over the paged KV cache. The cache already holds the tokens' own
// keys and values, unless the op applies rotary_kv.
//
//   out[t, h] = sum_c softmax_c(scale * q[t, h] . k[c, h / group]) v[c, h / group]
//
// c runs over the KV entries that token t sees (kernels/step/step_tokens.h). group = Hq / Hkv.
//
//   op                 tokens of a sequence  schedule
//   attention_prefill  any number            A CTA visits KV tiles in ascending entry order.
//   attention_decode   1..64                 KV tiles of 32 entries, splits at fixed entries
//                                            (split_begin), combined in ascending order.
//
// Contract: the bits of a token's result depend only on the entries that it sees and on their
// absolute positions. They do not depend on the prefill chunk, on the number of tokens, on the
// assignment of splits to CTAs, or on max_kv.
#pragma once

#include "kernels/layer/qkv_layout.h"
#include "kernels/layer/rotary_kv.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

// The blocks of 64 entries that each token sees, chosen by select_blocks
// (kernels/attention/sparse.h). Requires positions = own, no window, and by_position if there are
// masks. The arithmetic of a token that sees all blocks is that of dense attention if its entry is
// below kMaxDenseEntries.
struct BlockSelection {
  // [T, Hkv, words] uint64: the token sees block b if bit b is set. Empty: all tokens see all
  // blocks.
  Tensor words;
  int dense_len = 0;  // tokens at positions below it see all blocks, as in dense attention
  // Upper bound of the splits of a token (max_selected_splits). attention_decode reads it.
  int max_splits = 0;

  bool empty() const { return words.empty(); }
};

struct AttentionParams {
  Tensor out;  // [T, Hq * D]
  Tensor qkv;  // [T, columns of the layout]; only q is read, with RoPE applied
  QkvLayout layout{};
  Tensor k_cache;  // [pages, Hkv, 64, D]
  Tensor v_cache;  // [pages, Hkv, 64, D]
  // [pages, Hkv, 64, 1] float32: the caches are fp8, as in rotary_kv. A key's scale multiplies its
  // scores, a value's scale its probabilities. Empty: the caches have the dtype of qkv.
  Tensor k_scales{};
  Tensor v_scales{};
  float scale = 1;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  // 0: no window. Otherwise a token also needs entry > own - window to see an entry. own is the
  // token's own entry, L + first_token + j. If by_position, own is its position, L + depth.
  int window = 0;
  // Verification of trees: the arithmetic of a token equals that of plain decoding at its position.
  // The entries of the token's ancestors are taken in the order of depth, as if they were entries
  // L, L + 1, ... Therefore a token of an accepted path has the same bits as without speculation.
  // Requires ancestor_masks, first_token = 0, and positions = L + depth. All tokens share the KV
  // tiles that end at or below L.
  bool by_position = false;
  BlockSelection selection{};
  // [Hq] float32, attention sinks: one more logit of each query head in the softmax, without a
  // value. So out is multiplied by sigmoid(lse - sink), where lse is the log of the sum of
  // exp(scores). Empty: none.
  Tensor sinks{};
  StepTokens tokens;
  // attention_decode only: rotary_kv of the same qkv, caches and tokens, which the op applies
  // first. The queries in qkv are unspecified afterwards. Excludes a selection. Empty qkv:
  // rotary_kv has run.
  RotaryKvParams rotary{};
  // attention_splits only: a fused layer combines the splits. Then the op never combines them in
  // clusters, which is slower.
  bool leaves_combine = false;
  // float32. attention_decode: at least attention_scratch_floats(...) elements. attention_prefill
  // of heads of 128 over an fp8 cache on Hopper: at least fp8_pair_floats(...).
  Tensor scratch;
};

// If each sequence has one token, and there is neither a selection nor a sink, the kernel of
// attention_decode applies this rotary_kv itself. Otherwise the op launches rotary_kv before it.
constexpr int kMaxRotatedHeads = 16;  // query heads of a KV head
inline bool can_rotate(const RotaryKvParams& rotary) {
  return rotary.num_kv_heads > 0 && rotary.num_heads <= kMaxRotatedHeads * rotary.num_kv_heads &&
         (rotary.head_dim == 64 || rotary.head_dim == 128 || rotary.head_dim == 256) &&
         rotary.k_scales.empty();
}

REGISTER_OP(attention_prefill, AttentionParams)
// The two halves of attention_decode. attention_splits writes the partial results of the splits to
// scratch. For a token with only one split it writes `out` directly. attention_combine combines the
// other tokens. On the CPU, attention_splits does all the work.
REGISTER_OP(attention_splits, AttentionParams)
REGISTER_OP(attention_combine, AttentionParams)

inline void attention_decode(const Context& ctx, const AttentionParams& params) {
  attention_splits(ctx, params);
  attention_combine(ctx, params);
}

// ---- the fixed splits of attention_decode

// Split i covers the entries [split_begin(i), split_begin(i + 1)).
//
//   splits  entries of a split  up to entry
//   0..63   128                 8192
//   64..159 256                 32768
//   160..   1024                no limit
//
// Short splits spread short contexts over many SMs. Long splits limit the number of partial results
// of long contexts.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int split_begin(int split) {
  if (split <= 64) return split * 128;
  return split <= 160 ? 8192 + (split - 64) * 256 : 32768 + (split - 160) * 1024;
}
// Number of splits that cover the first `num_entries` entries.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int num_splits(int num_entries) {
  if (num_entries <= 8192) return (num_entries + 127) / 128;
  return num_entries <= 32768 ? 64 + (num_entries - 8192 + 255) / 256
                              : 160 + (num_entries - 32768 + 1023) / 1024;
}

// With a BlockSelection, a split is two blocks: split i of a token has its blocks 2 i and 2 i + 1,
// counted in ascending order. If the token sees all blocks, these are the splits of dense
// attention, up to this number of entries.
constexpr int kMaxDenseEntries = 8192;

// Maximum tokens of one launch. It bounds scratch for any number of sequences.
constexpr int kMaxScratchTokens = 256;

// Size of the partial results: D accumulators, a row maximum and a sum for each split, token and
// query head.
constexpr int64_t attention_scratch_floats(int num_tokens, int num_heads, int head_dim,
                                           int max_kv) {
  return static_cast<int64_t>(num_splits(max_kv)) * num_tokens * num_heads * (head_dim + 2);
}
// The same with a BlockSelection.
constexpr int64_t sparse_scratch_floats(int num_tokens, int num_heads, int head_dim,
                                        int max_splits) {
  return static_cast<int64_t>(max_splits) * num_tokens * num_heads * (head_dim + 2);
}

// ---- the scratch of attention_prefill over an fp8 cache (fp8_copies.cuh)

constexpr int kCopyEntries = 128;  // entries of a KV tile; a copy has whole KV tiles

// Entries of a sequence and KV head.
constexpr int fp8_pair_entries(int max_kv) {
  return (max_kv + kCopyEntries - 1) / kCopyEntries * kCopyEntries;
}
// Floats that hold the 16-bit keys and values of a sequence and KV head, and their scales.
constexpr int64_t fp8_pair_floats(int head_dim, int max_kv) {
  return int64_t{fp8_pair_entries(max_kv)} * (head_dim + 2);
}
// The scratch that a model plans. It holds all KV heads of a sequence if they fit 320 MiB,
// otherwise as many as fit, at least one. With fewer heads in a round, SMs would be idle: four KV
// heads of Llama-3.1-8B and a prompt of 2048 tokens make 256 CTAs, and an SM holds one.
constexpr int64_t fp8_prefill_floats(int num_kv_heads, int head_dim, int max_kv) {
  const int64_t pair = fp8_pair_floats(head_dim, max_kv), most = (int64_t{320} << 20) / 4 / pair;
  return pair * (most < 1 ? 1 : most < num_kv_heads ? most : num_kv_heads);
}

}  // namespace cpmcu
