// Block-sparse attention after InfLLM-v2: compressed keys, and the choice of blocks for a query. A
// block is the 64 tokens of a page. attention.h attends to the chosen blocks.
//
// Compressed keys are means of keys after RoPE. A compressed key lies in the page of its last
// token:
//
//   key        tokens                rows a page  row of page b
//   fine[r]    16 (r - 1) .. + 31    4            r = 4 b .. 4 b + 3
//   coarse[b]  64 (b - 1) .. + 127   1            b
//
// fine[0] and coarse[0] would begin before the first token; they are 0 and never read.
//
// The choice for a query at position p, in block q = p / 64, and a KV head:
//   p < dense_len  all blocks up to q
//   otherwise      the first init_blocks; the window, which is the window_size / 64 blocks that end
//                  with q; and of the blocks between them the topk - init_blocks with the highest
//                  scores, or all if there are no more. If two scores are equal, the lower block
//                  wins.
//
//   score(b) = max of f[r], r = 4 b .. 4 b + 4
//   f[r]     = sum over the group's heads h of exp(s_h[r] - m_h) / Z_h,  s_h[r] = q_h . fine[r]
//   m_h, Z_h = maximum, and sum of exp(. - m_h), of q_h . coarse[b]      (all times `scale`)
//
// Only the rows of pages up to q - 2 are used. All tokens of these pages are committed: a tree has
// depth below 64. Therefore the choice depends on the query and on committed keys alone. It does
// not depend on the chunk, the tree or the other tokens of a step.
#pragma once

#include <vector>

#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

constexpr int kFineStride = 16, kFineTokens = 32;
constexpr int kFineRows = kPageSize / kFineStride;  // fine compressed keys of a page
constexpr int kCoarseTokens = 128;

// Maximum number of tokens of a sequence on CUDA. The registers of select_blocks hold the scores of
// their blocks.
constexpr int kMaxSparseEntries = 1 << 18;

struct SparseRule {
  int init_blocks = 1;  // first blocks that every query sees, at most topk
  // Tokens before a query whose blocks it sees: a multiple of 64, at least 128.
  int window_size = 2048;
  int topk = 64;         // blocks that are chosen outside the window
  int dense_len = 8192;  // tokens at positions below it see all blocks
};

inline void check_rule(const SparseRule& rule) {
  CHECK(rule.init_blocks >= 0 && rule.topk >= rule.init_blocks,
        "init_blocks is {} and topk {}, expected at least 0, and at least init_blocks",
        rule.init_blocks, rule.topk);
  CHECK(rule.window_size >= 2 * kPageSize && rule.window_size % kPageSize == 0,
        "window_size is {}, expected a multiple of {}, at least {}", rule.window_size, kPageSize,
        2 * kPageSize);
  CHECK(rule.dense_len >= 0, "dense_len is {}, expected at least 0", rule.dense_len);
}

// In the dtype of the queries, also if the cache is fp8.
struct CompressedKeys {
  Tensor fine;    // [pages, Hkv, 4, D]
  Tensor coarse;  // [pages, Hkv, 1, D]
};

// The planes of one layer.
struct LayerKeys {
  Tensor k_cache;  // [pages, Hkv, 64, D]
  // [pages, Hkv, 64, 1] float32 scales of an fp8 cache, as in rotary_kv; or empty.
  Tensor k_scales{};
  CompressedKeys compressed;
};

// Writes the compressed keys that end among the last tokens of each sequence. These are the tokens
// of a prefill step, or with accepted_counts the accepted tokens of a decode step. slot_lengths
// counts the cached tokens before a prefill step, and after the acceptance of a decode step.
struct CompressKeysParams {
  std::vector<LayerKeys> layers;         // at least one; all have the same shapes and dtypes
  const int* accepted_counts = nullptr;  // [slots] numbers of accepted tokens; null: a prefill step
  StepTokens tokens;
};
REGISTER_OP(compress_keys, CompressKeysParams)

// 64-bit words of a bitmap with one bit for each block of up to max_kv tokens.
constexpr int64_t selection_words(int max_kv) {
  return (int64_t{max_kv} + kPageSize * 64 - 1) / (kPageSize * 64);
}

// The scratch of select_blocks on CUDA, for each token and KV head.
// Coarse keys of one part; each part of m and Z is summed by itself.
constexpr int kScorePart = 128;
// Maximum number of tokens of a launch; more tokens take several launches.
constexpr int kMaxScoredTokens = 1024;

struct BlockScoresShape {
  int num_parts, num_heads, num_blocks;

  static constexpr BlockScoresShape of(int group, int max_kv) {
    const int num_blocks = static_cast<int>(selection_words(max_kv)) * 64;
    return {.num_parts = (num_blocks + kScorePart - 1) / kScorePart,
            .num_heads = (group + 15) / 16 * 16,
            .num_blocks = num_blocks};
  }
  constexpr int64_t floats() const {
    return 2 * int64_t{num_parts} * num_heads + num_blocks + num_blocks / 8;
  }
};
constexpr int64_t select_scratch_floats(int num_tokens, int num_heads, int num_kv_heads,
                                        int max_kv) {
  const int most = num_tokens < kMaxScoredTokens ? num_tokens : kMaxScoredTokens;
  return BlockScoresShape::of(num_heads / num_kv_heads, max_kv).floats() * most * num_kv_heads;
}

// The memory in which CTAs of one launch send each other results, for steps of one token of each
// sequence. More rows (sequences times KV heads) take several launches.
constexpr int64_t kSelectMessageBytes =
    16 + kMaxSparseEntries / kPageSize / 32 * int64_t{16 * 16 + 32 * 8 + 8};  // bytes of one row
constexpr int kMaxMessageRows = 16;
constexpr int64_t select_memory_bytes(int num_seqs, int num_kv_heads) {
  const int rows = num_seqs * num_kv_heads;
  return kSelectMessageBytes * (rows < kMaxMessageRows ? rows : kMaxMessageRows);
}

struct SelectBlocksParams {
  Tensor selection;  // [T, Hkv, words] uint64, out: bit b is set if block b is chosen
  Tensor qkv;        // [T, columns of the layout]; only q is read, with RoPE applied
  QkvLayout layout{};
  CompressedKeys keys;
  float scale = 1;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  SparseRule rule;
  // Earlier passes wrote the compressed keys; a kernel then reads them before the previous kernel
  // ends (core/launch.h). False in a prefill step.
  bool keys_are_old = false;
  StepTokens tokens;  // `positions` are the positions of the queries
  Tensor scratch;     // on CUDA: float32, at least select_scratch_floats(...) elements
  // [select_memory_bytes] uint8 on CUDA, zero before the first launch and kept between launches.
  // Empty: several launches.
  Tensor memory{};
};
REGISTER_OP(select_blocks, SelectBlocksParams)

// An upper bound of a token's splits in attention_decode. A split is two of its blocks
// (attention.h).
constexpr int max_selected_splits(const SparseRule& rule, int max_kv) {
  const auto splits = [](int64_t blocks) { return (blocks + 1) / 2; };
  const int64_t all = splits((int64_t{max_kv} + kPageSize - 1) / kPageSize);
  const int64_t dense = splits((int64_t{rule.dense_len} + kPageSize - 1) / kPageSize);
  const int64_t sparse = splits(int64_t{rule.topk} + rule.window_size / kPageSize);
  const int64_t most = sparse > dense ? sparse : dense;
  return static_cast<int>(most < all ? most : all);
}

// ---- shared by the back ends

// The tokens of a sequence whose compressed keys compress_keys writes.
struct NewTokens {
  int begin, end;
};
constexpr NewTokens new_tokens(const StepTokens& tokens, const int* accepted_counts, int seq) {
  const int slot = tokens.seq_slots[seq], length = tokens.slot_lengths[slot];
  if (accepted_counts != nullptr) return {length - accepted_counts[slot], length};
  return {length, length + tokens.seq_token_begin[seq + 1] - tokens.seq_token_begin[seq]};
}

// The blocks of a query. It always attends to the blocks [0, init_end) and [window_begin, own].
// Scores choose `count` of the blocks between them.
struct QueryBlocks {
  int own, init_end, window_begin, count;

  constexpr int num_between() const { return window_begin - init_end; }
  // False: all blocks between are chosen, or none.
  constexpr bool needs_scores() const { return count > 0 && count < num_between(); }
  // The query sees the rows fine[1 .. fine_end) and coarse[1 .. coarse_end).
  constexpr int fine_end() const { return kFineRows * coarse_end(); }
  constexpr int coarse_end() const { return own > 1 ? own - 1 : 0; }
};

constexpr QueryBlocks blocks_of_query(const SparseRule& rule, int position) {
  QueryBlocks blocks{.own = position / kPageSize, .init_end = 0, .window_begin = 0, .count = 0};
  const int begin = blocks.own + 1 - rule.window_size / kPageSize;
  if (position < rule.dense_len || begin <= 0) return blocks;
  blocks.window_begin = begin;
  blocks.init_end = rule.init_blocks < begin ? rule.init_blocks : begin;
  const int num_best = rule.topk - rule.init_blocks, num_between = begin - blocks.init_end;
  blocks.count = num_best < num_between ? num_best : num_between;
  return blocks;
}

}  // namespace cpmcu
