// The rows of one of several MTP modules (csrc/speculative/drafters/mtp_modules.cpp).
//
// Row q of module m reads the id of token q + m + 1. L tokens are cached, so the rows from L - m on
// read drafted tokens, which differ between the branches of a tree. `mtp_rows` makes the last
// n = min(W, L - num_shared) rows of each sequence; earlier ones are final. With e = min(m, n):
//
//   row of the launch                q          tokens beyond L
//   0 .. n - e - 1                   L - n + j  none
//   n - e + r e + i, i < e, r < k    L - e + i  branch r of the draft
//   others                           padding, behind all entries that other rows see
//
// Row j is written to entry L - n + j of the module's cache, at position q. So the first branch has
// the entries that the accepted tokens will have.
//
// A prompt has no branches: the tokens beyond L are those of its chunk, and id 0 beyond its end.
// There is no padding: each sequence has n rows.
#pragma once

#include "kernels/op.h"
#include "kernels/step/step_ops.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

struct MtpRows {
  int* ids = nullptr;                  // [R]
  int* positions = nullptr;            // [R]
  int* token_seqs = nullptr;           // [R]
  int* hidden_rows = nullptr;          // [R]
  uint64_t* ancestor_masks = nullptr;  // [R]; not written for a prompt
  int* seq_token_begin = nullptr;      // [B + 1]
  // The last row of each branch, [B] for module 0, else [B, k]. Not of a prompt.
  int* last_rows = nullptr;
  int* lengths = nullptr;  // [slots] L - n: entries in the module's cache before these rows
};

struct MtpRowsParams {
  int module = 0;  // m
  int window = 0;  // W: equal to Accepted::max_path
  // hidden_rows are rows of the launch of module m - 1, else Accepted::hidden_row of token q.
  bool chain_hidden = false;
  int num_seqs = 0;                // B
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;   // lengths, next_tokens, num_shared, history and accepted are read
  DraftBeam beam{};  // grown up to level m - 1; without tokens: the rows are a prompt's
  const int* prompt_ids = nullptr;    // [T]
  const int* prompt_begin = nullptr;  // [B + 1]
  int* draft_lengths = nullptr;  // [slots] written by module 0: the value that begin_draft leaves
  MtpRows rows;                  // out
};
REGISTER_OP(mtp_rows, MtpRowsParams)

// The rows of a sequence in the launch of module m that drafts.
constexpr int mtp_rows_of(int window, int module, int topk) { return window + module * (topk - 1); }

inline void check_mtp_rows(const MtpRowsParams& p) {
  CHECK(p.prompt_ids != nullptr || mtp_rows_of(p.window, p.module, p.beam.topk) <= kMaxTreeSize,
        "mtp_rows: module {}, a window of {} and top-k {} make {} rows, expected at most {}",
        p.module, p.window, p.beam.topk, mtp_rows_of(p.window, p.module, p.beam.topk),
        kMaxTreeSize);
}

// shifted[t] = ids[t + shift], or 0 if that is beyond the tokens of the sequence.
struct ShiftIdsParams {
  int shift = 0;
  int num_tokens = 0;                    // T
  const int* ids = nullptr;              // [T]
  const int* token_seqs = nullptr;       // [T]
  const int* seq_token_begin = nullptr;  // [B + 1]
  int* shifted = nullptr;                // [T] out
};
REGISTER_OP(shift_ids, ShiftIdsParams)

// The computation of one sequence's rows, for the CPU and CUDA implementations (nvcc compiles
// constexpr functions for both).
struct MtpSequence {
  const MtpRowsParams& p;
  int seq, slot, length, num_rows, num_branched;  // `length` is L, num_rows n, num_branched e
  int topk;                                       // k; 1 for a prompt

  static constexpr MtpSequence of(const MtpRowsParams& p, int seq) {
    const int slot = p.seq_slots[seq], length = p.slots.lengths[slot];
    const int own = length - (p.slots.num_shared ? p.slots.num_shared[slot] : 0);
    const int num_rows = own < p.window ? own : p.window;
    const int num_branched = p.module < num_rows ? p.module : num_rows;
    return {p, seq, slot, length, num_rows, num_branched, p.prompt_ids ? 1 : p.beam.topk};
  }

  constexpr int num_common() const { return num_rows - num_branched; }
  // Rows of the sequence in the launch of `module`, padding included.
  constexpr int rows_in_launch(int module) const {
    return p.prompt_ids ? num_rows : mtp_rows_of(p.window, module, topk);
  }
  constexpr bool is_padding(int row) const { return row >= num_common() + topk * num_branched; }
  // The branch of a row; 0 for a common row.
  constexpr int branch_of(int row) const {
    return row < num_common() ? 0 : (row - num_common()) / num_branched;
  }
  // q.
  constexpr int position_of(int row) const {
    if (row < num_common()) return length - num_rows + row;
    return length - num_branched + (row - num_common()) % num_branched;
  }
  // The row of `branch` that has position q.
  constexpr int row_of(int branch, int position) const {
    const int from_end = position - (length - num_branched);
    return from_end < 0 ? position - (length - num_rows)
                        : num_common() + branch * num_branched + from_end;
  }
  // Row of the level before of node `row` of level `level` of the beam.
  constexpr int parent_of(int level, int row) const {
    const int candidate = p.beam.level_candidates[(seq * p.beam.depth + level) * topk + row];
    return level == 0 ? 0 : (candidate - topk) % (topk * topk) / topk;
  }
  // The id of the token at `position`, on a branch of level m - 1.
  constexpr int id_at(int position, int branch) const {
    if (position < length) return p.slots.history[int64_t{slot} * p.slots.max_len + position];
    if (p.prompt_ids) {
      const int at = p.prompt_begin[seq] + position - length;
      return at < p.prompt_begin[seq + 1] ? p.prompt_ids[at] : 0;
    }
    if (position == length) return p.slots.next_tokens[slot];
    int row = branch;
    for (int level = p.module - 1; level > position - length - 1; --level) {
      row = parent_of(level, row);
    }
    const int level = position - length - 1;
    const int candidate = p.beam.level_candidates[(seq * p.beam.depth + level) * topk + row];
    return p.beam.tokens[seq * num_candidates(topk, p.beam.depth) + candidate];
  }
  // The row of the hidden state that a row reads. `begin_before`: the sequence's first row in the
  // launch before.
  constexpr int hidden_row_of(int row, int begin_before) const {
    const int position = position_of(row);
    if (!p.chain_hidden || p.module == 0) return p.slots.accepted.hidden_row(slot, position);
    MtpSequence before = *this;
    before.num_branched = p.module - 1 < num_rows ? p.module - 1 : num_rows;
    const int parent = p.module == 1 || p.prompt_ids ? 0 : parent_of(p.module - 1, branch_of(row));
    return begin_before + before.row_of(parent, position);
  }
  // The rows that a row sees: the common ones, and those of its branch up to itself.
  constexpr uint64_t mask_of(int row) const {
    const auto below = [](int bits) {
      return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    };
    if (is_padding(row)) return uint64_t{1} << row;
    if (row < num_common()) return below(row + 1);
    const int first = num_common() + branch_of(row) * num_branched;
    return below(num_common()) | (below(row + 1) & ~below(first));
  }
  // Writes row i of the sequence to row `begin` + i of the launch.
  constexpr void write_row(int i, int begin, int begin_before) const {
    const MtpRows& out = p.rows;
    const int at = begin + i;
    const bool pads = is_padding(i);
    const int row = pads ? 0 : i, position = position_of(row);
    out.ids[at] = pads ? 0 : id_at(position + p.module + 1, branch_of(row));
    out.positions[at] = pads ? length - num_rows + i : position;
    out.token_seqs[at] = seq;
    out.hidden_rows[at] = hidden_row_of(row, begin_before);
    if (!p.prompt_ids) out.ancestor_masks[at] = mask_of(i);
  }
  // The number of last rows, one for each branch.
  constexpr int num_last() const { return p.prompt_ids ? 0 : p.module == 0 ? 1 : p.beam.topk; }
  constexpr void write_last_row(int branch, int begin) const {
    p.rows.last_rows[seq * num_last() + branch] = begin + row_of(branch, length - 1);
  }
  constexpr void write_lengths() const {
    p.rows.lengths[slot] = length - num_rows;
    if (p.draft_lengths == nullptr || p.module != 0) return;
    const int accepted = p.slots.accepted.counts[slot];
    p.draft_lengths[slot] = length - (accepted > 1 ? accepted : 1);
  }
};

}  // namespace cpmcu
