// The tokens of one forward step. All arrays are device memory.
//
// A step has T tokens of B sequences. The tokens of one sequence are contiguous. Let L be the
// number of cached tokens of a sequence before the step. For token j of this sequence:
//
//   KV entry    L + j.
//   position    L + j in a chain, L + depth in a tree. RoPE uses the position. If a launch has only
//               one token, its position must equal its KV entry.
//   visibility  All entries below L, and the entries of this step that its mask names. Bit i of
//               ancestor_masks is token i of the same sequence; a token's own bit is set. Without
//               masks, token j sees tokens 0..j (causal).
//
// One step may take several launches, one for each level of a draft tree. Token j of a launch is
// then token first_token + j of the step: KV entry L + first_token + j, bit first_token + j.
#pragma once

#include <cstdint>

namespace cpmcu {

constexpr int kPageSize = 64;  // tokens in one page
// Maximum number of tokens of a sequence in a decode step: the bits of a mask.
constexpr int kMaxTreeSize = 64;

struct StepTokens {
  int num_tokens = 0;      // T
  int num_seqs = 0;        // B
  int max_seq_tokens = 0;  // upper bound of any sequence's number of tokens
  int first_token = 0;  // number of this launch's first token within the step, for every sequence
  // Upper bound of L plus the tokens of a sequence. It affects the sizes of grids, never results.
  int max_kv = 0;
  const int* positions = nullptr;        // [T]
  const int* token_seqs = nullptr;       // [T] number of the token's sequence among the B
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1] first token of each sequence among the T, then T
  const int* slot_lengths = nullptr;     // [slots] L, cached tokens before this step
  const uint64_t* ancestor_masks = nullptr;  // [T]; null: causal visibility
  // [T] parent, as the number of a token within its sequence; -1 for the first token. Null: the
  // parent is the token before.
  const int* token_parents = nullptr;
  // [slots, max_pages]: page i of a slot holds its entries from 64 i on.
  const int* page_table = nullptr;
  int max_pages = 0;
};

// Sequences [first, first + count) of a step whose sequences all have the same number of tokens.
inline StepTokens sequences_of(const StepTokens& tokens, int first, int count) {
  const int seq_tokens = tokens.num_tokens / tokens.num_seqs, token = first * seq_tokens;
  StepTokens part = tokens;  // the part has token_seqs and seq_token_begin that start at 0, too
  part.num_seqs = count;
  part.num_tokens = count * seq_tokens;
  part.positions += token;
  part.seq_slots += first;
  if (part.ancestor_masks != nullptr) part.ancestor_masks += token;
  if (part.token_parents != nullptr) part.token_parents += token;
  return part;
}

// Offset in elements of KV entry `entry` of a slot in a layer's cache [pages, Hkv, 64, D].
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int64_t kv_offset(const int* page_table, int max_pages, int slot, int entry, int head,
                             int num_kv_heads, int head_dim) {
  const int64_t page = page_table[static_cast<int64_t>(slot) * max_pages + entry / kPageSize];
  return ((page * num_kv_heads + head) * kPageSize + entry % kPageSize) * head_dim;
}

}  // namespace cpmcu
