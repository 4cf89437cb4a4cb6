// The rows of one forward step: a row is one token of one sequence. All arrays are device memory.
//
// T rows belong to B sequences, the rows of a sequence lie together. Row j of a sequence with L
// cached tokens has its key in cell L + j of that sequence; its position is L + j in a chain and
// L + depth in a tree: RoPE's, and the cell of a row that is alone in a launch. It sees cells below
// L and, of the cells of this step, those its mask names: bit i of row_masks stands for row i of
// the same sequence, itself included. Without masks it sees rows 0..j (causal).
//
// The levels of a draft tree are launches of one step: rows j of a later launch are rows
// first_row + j of the step (cell L + first_row + j, bit first_row + j).
#pragma once

#include <cstdint>

namespace cpmcu {

constexpr int kPageSize = 64;     // tokens of one KV page
constexpr int kMaxTreeSize = 64;  // rows of one sequence in a decode step: bits of a mask

struct StepRows {
  int num_rows = 0;                     // T
  int num_seqs = 0;                     // B
  int max_seq_rows = 0;                 // upper bound of one sequence's rows
  int first_row = 0;                    // of this launch in each sequence's step
  int max_kv = 0;                       // upper bound of any L + rows: sizes grids, never results
  const int* positions = nullptr;       // [T]
  const int* row_seqs = nullptr;        // [T] index into the B sequences
  const int* seq_slots = nullptr;       // [B]
  const int* seq_row_begin = nullptr;   // [B + 1] first row of each sequence
  const int* slot_lengths = nullptr;    // [slots] L, cached tokens before this step
  const uint64_t* row_masks = nullptr;  // [T], null: causal
  // [T] row of the same sequence that comes before; of the first -1. Null: the row above.
  const int* row_parents = nullptr;
  const int* page_table = nullptr;  // [slots, max_pages] page of each 64 cells
  int max_pages = 0;
};

// Sequences [first, first + count) of a step in which all have equally many rows.
inline StepRows sequences_of(const StepRows& rows, int first, int count) {
  const int seq_rows = rows.num_rows / rows.num_seqs, row = first * seq_rows;
  StepRows part = rows;  // row_seqs and seq_row_begin count from 0 in both
  part.num_seqs = count;
  part.num_rows = count * seq_rows;
  part.positions += row;
  part.seq_slots += first;
  if (part.row_masks != nullptr) part.row_masks += row;
  if (part.row_parents != nullptr) part.row_parents += row;
  return part;
}

// Where cell `cell` of a slot lies in a layer's cache [pages, Hkv, 64, D], in elements.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int64_t kv_offset(const int* page_table, int max_pages, int slot, int cell, int head,
                             int num_kv_heads, int head_dim) {
  const int64_t page = page_table[static_cast<int64_t>(slot) * max_pages + cell / kPageSize];
  return ((page * num_kv_heads + head) * kPageSize + cell % kPageSize) * head_dim;
}

}  // namespace cpmcu
