#include "kernels/tree/mtp_rows.h"

#include <algorithm>

namespace cpmcu::cpu {

void mtp_rows(const Context&, const MtpRowsParams& p) {
  check_mtp_rows(p);
  const MtpRows& out = p.rows;
  const int num_last = p.module == 0 ? 1 : p.beam.topk;
  int begin = 0, begin_before = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const MtpSequence sequence = MtpSequence::of(p, seq);
    const int count = sequence.rows_in_launch(p.module);
    for (int i = 0; i < count; ++i) {
      const int at = begin + i;
      const bool pads = sequence.is_padding(i);
      const int row = pads ? 0 : i, position = sequence.position_of(row);
      out.ids[at] = pads ? 0 : sequence.id_at(position + p.module + 1, sequence.branch_of(row));
      out.positions[at] = pads ? sequence.length - sequence.num_rows + i : position;
      out.token_seqs[at] = seq;
      out.hidden_rows[at] = sequence.hidden_row_of(row, begin_before);
      if (!p.prompt_ids) out.ancestor_masks[at] = sequence.mask_of(i);
    }
    for (int r = 0; r < num_last && !p.prompt_ids; ++r) {
      out.last_rows[seq * num_last + r] = begin + sequence.row_of(r, sequence.length - 1);
    }
    out.lengths[sequence.slot] = sequence.length - sequence.num_rows;
    if (p.draft_lengths && p.module == 0) {
      p.draft_lengths[sequence.slot] =
          sequence.length - std::max(p.slots.accepted.counts[sequence.slot], 1);
    }
    out.seq_token_begin[seq] = begin;
    begin += count;
    begin_before += sequence.rows_in_launch(p.module - 1);
  }
  out.seq_token_begin[p.num_seqs] = begin;
}

void shift_ids(const Context&, const ShiftIdsParams& p) {
  for (int t = 0; t < p.num_tokens; ++t) {
    const int from = t + p.shift;
    p.shifted[t] = from < p.seq_token_begin[p.token_seqs[t] + 1] ? p.ids[from] : 0;
  }
}

}  // namespace cpmcu::cpu
