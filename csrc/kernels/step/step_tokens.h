// The rows of one forward step: a row is one token of one sequence. All arrays are device memory.
//
// T rows belong to B sequences, the rows of a sequence lie together. Row j of a sequence with L
// cached tokens has its key in entry L + j of that sequence; its position is L + j in a chain and
// L + depth in a tree: RoPE's, and the entry of a row that is alone in a launch. It sees entries
// below L and, of the entries of this step, those its mask names: bit i of ancestor_masks stands
// for row i of the same sequence, itself included. Without masks it sees rows 0..j (causal).
//
// The levels of a draft tree are launches of one step: rows j of a later launch are rows
// first_token + j of the step (entry L + first_token + j, bit first_token + j).
#pragma once

#include <cstdint>

namespace cpmcu {

constexpr int kPageSize = 64;     // tokens of one KV page
constexpr int kMaxTreeSize = 64;  // rows of one sequence in a decode step: bits of a mask

struct StepTokens {
  int num_tokens = 0;                    // T
  int num_seqs = 0;                      // B
  int max_seq_tokens = 0;                // upper bound of one sequence's rows
  int first_token = 0;                   // of this launch in each sequence's step
  int max_kv = 0;                        // upper bound of any L + rows: sizes grids, never results
  const int* positions = nullptr;        // [T]
  const int* token_seqs = nullptr;       // [T] index into the B sequences
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1] first row of each sequence
  const int* slot_lengths = nullptr;     // [slots] L, cached tokens before this step
  const uint64_t* ancestor_masks = nullptr;  // [T], null: causal
  // [T] row of the same sequence that comes before; of the first -1. Null: the row above.
  const int* token_parents = nullptr;
  const int* page_table = nullptr;  // [slots, max_pages] page of each 64 entries
  int max_pages = 0;
};

// Sequences [first, first + count) of a step in which all have equally many rows.
inline StepTokens sequences_of(const StepTokens& tokens, int first, int count) {
  const int seq_rows = tokens.num_tokens / tokens.num_seqs, row = first * seq_rows;
  StepTokens part = tokens;  // token_seqs and seq_token_begin count from 0 in both
  part.num_seqs = count;
  part.num_tokens = count * seq_rows;
  part.positions += row;
  part.seq_slots += first;
  if (part.ancestor_masks != nullptr) part.ancestor_masks += row;
  if (part.token_parents != nullptr) part.token_parents += row;
  return part;
}

// Where entry `entry` of a slot lies in a layer's cache [pages, Hkv, 64, D], in elements.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int64_t kv_offset(const int* page_table, int max_pages, int slot, int entry, int head,
                             int num_kv_heads, int head_dim) {
  const int64_t page = page_table[static_cast<int64_t>(slot) * max_pages + entry / kPageSize];
  return ((page * num_kv_heads + head) * kPageSize + entry % kPageSize) * head_dim;
}

}  // namespace cpmcu
