// Attention of a step's rows over the paged KV cache (their own keys are already in it).
//
// out[t, h] = sum_c softmax_c(scale * q[t, h] . k[c, h / group]) v[c, h / group], c over the
// entries that row t sees (kernels/step/step_tokens.h).
//
// Two kernels. `attention_prefill`: many rows of a sequence, tiles of keys visited in the order of
// their absolute position, so that a row's bits do not depend on the chunk it came in.
// `attention_decode`: up to 64 rows of a sequence; the rows of all query heads of a KV head are
// packed into tiles, keys are taken in units of 32 and splits at fixed absolute positions
// (split_begin), partial results are combined in the order of the splits: a row's bits do not
// depend on the number of rows, on how blocks share the splits, nor on max_kv.
#pragma once

#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct AttentionParams {
  Tensor out;  // [T, Hq * D]
  Tensor qkv;  // [T, columns of the layout]; only q is read, after RoPE
  QkvLayout layout{};
  Tensor k_cache;  // [pages, Hkv, 64, D]
  Tensor v_cache;  // [pages, Hkv, 64, D]
  float scale = 1;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  // 0: all entries; else a row sees only the last `window` entries up to its own (entry > own -
  // window, where own = L + first_token + row; by_position: own = L + depth).
  int window = 0;
  // For trees that are verified (ancestor_masks set, first_token 0): each row's arithmetic is that
  // of plain decoding at its position. The entries of its ancestors, found through its mask, are
  // taken in the order of their depth as entries L, L + 1, …: so a row of an accepted path has the
  // bits that it would have had without speculation. Needs tokens.ancestor_masks, and that a row's
  // position is L + depth. Cells below L are shared by all rows, but for up to 31 before the tree.
  bool by_position = false;
  StepTokens tokens;
  Tensor scratch;  // attention_decode: float32, at least attention_scratch_floats(...) long
};

REGISTER_OP(attention_prefill, AttentionParams)
// The two halves of attention_decode: the splits write partial results to scratch, and `out` itself
// for rows that have one split only; the others are then combined. On the CPU the first does all.
REGISTER_OP(attention_splits, AttentionParams)
REGISTER_OP(attention_combine, AttentionParams)

inline void attention_decode(const Context& ctx, const AttentionParams& params) {
  attention_splits(ctx, params);
  attention_combine(ctx, params);
}

// ---- the fixed splits of attention_decode

// Split i covers entries [split_begin(i), split_begin(i + 1)): 64 splits of 128 entries (up to
// 8192), 96 of 256 (up to 32768), then of 1024 each. So short contexts spread over many
// multiprocessors, and long ones need few partials. All are whole numbers of 128 entries.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int split_begin(int split) {
  if (split <= 64) return split * 128;
  return split <= 160 ? 8192 + (split - 64) * 256 : 32768 + (split - 160) * 1024;
}
// Number of splits that cover `num_entries` entries.
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int num_splits(int num_entries) {
  if (num_entries <= 8192) return (num_entries + 127) / 128;
  return num_entries <= 32768 ? 64 + (num_entries - 8192 + 255) / 256
                              : 160 + (num_entries - 32768 + 1023) / 1024;
}

// Tokens of one launch, so that scratch does not grow with the number of sequences.
constexpr int kMaxScratchTokens = 256;

// Partial results: per split and packed row D accumulators, a row_max and a sum.
constexpr int64_t attention_scratch_floats(int num_tokens, int num_heads, int head_dim,
                                           int max_kv) {
  return static_cast<int64_t>(num_splits(max_kv)) * num_tokens * num_heads * (head_dim + 2);
}

}  // namespace cpmcu
