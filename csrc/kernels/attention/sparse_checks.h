// The checks of sparse attention that both back ends share.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/attention/sparse.h"
#include "kernels/layer/rotary_kv.h"

namespace cpmcu {

inline void check_keys(const CompressedKeys& keys, const Tensor& like, int num_kv_heads,
                       int head_dim, const char* op) {
  const auto fits = [&](const Tensor& rows, int64_t count) {
    return rows.num_dims() == 4 && rows.dtype() == like.dtype() && rows.size(1) == num_kv_heads &&
           rows.size(2) == count && rows.size(3) == head_dim;
  };
  CHECK(fits(keys.fine, kFineRows) && fits(keys.coarse, 1),
        "{}: compressed keys {} and {}, expected [pages, {}, {}, {}] and [pages, {}, 1, {}] of {}",
        op, keys.fine.shape_text(), keys.coarse.shape_text(), num_kv_heads, kFineRows, head_dim,
        num_kv_heads, head_dim, name_of(like.dtype()));
}

inline void check_compress(const CompressKeysParams& p) {
  CHECK(!p.layers.empty(), "compress_keys: no layers, expected at least one");
  const Tensor& first = p.layers.front().k_cache;
  CHECK(first.num_dims() == 4 && first.size(2) == kPageSize,
        "compress_keys: k_cache is {}, expected [pages, heads, {}, head_dim]", first.shape_text(),
        kPageSize);
  for (const LayerKeys& layer : p.layers) {
    CHECK(
        layer.k_cache.shape_text() == first.shape_text() && layer.k_cache.dtype() == first.dtype(),
        "compress_keys: k_cache of a layer is {} of {}, expected {} of {} like the first one",
        layer.k_cache.shape_text(), name_of(layer.k_cache.dtype()), first.shape_text(),
        name_of(first.dtype()));
    const int num_heads = static_cast<int>(first.size(1)),
              head_dim = static_cast<int>(first.size(3));
    const Tensor& like = p.layers.front().compressed.fine;
    check_keys(layer.compressed, like, num_heads, head_dim, "compress_keys");
    check_kv_cache("compress_keys", layer.k_cache, layer.k_scales, like.dtype(), num_heads,
                   head_dim);
  }
  CHECK(p.tokens.first_token == 0, "compress_keys: first_token is {}, expected 0",
        p.tokens.first_token);
}

inline void check_words(const Tensor& words, const StepTokens& tokens, int num_kv_heads,
                        const char* op) {
  const int64_t needed = selection_words(tokens.max_kv);
  CHECK(words.num_dims() == 3 && words.dtype() == DType::kU64 &&
            words.size(0) >= tokens.num_tokens && words.size(1) == num_kv_heads &&
            words.size(2) >= needed,
        "{}: selection is {} of {}, expected [{}, {}, {}] of uint64", op, words.shape_text(),
        name_of(words.dtype()), tokens.num_tokens, num_kv_heads, needed);
}

inline void check_select(const SelectBlocksParams& p) {
  check_rule(p.rule);
  CHECK(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
        "select_blocks: {} query heads, expected a multiple of the {} KV heads", p.num_heads,
        p.num_kv_heads);
  check_words(p.selection, p.tokens, p.num_kv_heads, "select_blocks");
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  CHECK(
      p.qkv.num_dims() == 2 && p.qkv.size(0) >= p.tokens.num_tokens && p.qkv.size(1) == layout.row,
      "select_blocks: qkv is {}, expected [{}, {}]", p.qkv.shape_text(), p.tokens.num_tokens,
      layout.row);
  check_keys(p.keys, p.qkv, p.num_kv_heads, p.head_dim, "select_blocks");
}

// Checks the selection of attention_prefill and attention_splits.
inline void check_selection(const AttentionParams& p) {
  if (p.selection.empty()) return;
  check_words(p.selection.words, p.tokens, p.num_kv_heads, "attention");
  CHECK(p.window == 0 && p.tokens.first_token == 0 &&
            (p.tokens.ancestor_masks == nullptr || p.by_position),
        "attention: a selection with a window of {}, first_token {} or masks without by_position",
        p.window, p.tokens.first_token);
}

}  // namespace cpmcu
