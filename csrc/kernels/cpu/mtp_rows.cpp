#include "kernels/tree/mtp_rows.h"

namespace cpmcu::cpu {

void mtp_rows(const Context&, const MtpRowsParams& p) {
  check_mtp_rows(p);
  int* const seq_token_begin = p.rows.seq_token_begin;
  int begin = 0, begin_before = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const MtpSequence sequence = MtpSequence::of(p, seq);
    const int count = sequence.rows_in_launch(p.module);
    for (int i = 0; i < count; ++i) sequence.write_row(i, begin, begin_before);
    for (int branch = 0; branch < sequence.num_last(); ++branch) {
      sequence.write_last_row(branch, begin);
    }
    sequence.write_lengths();
    seq_token_begin[seq] = begin;
    begin += count;
    begin_before += sequence.rows_in_launch(p.module - 1);
  }
  seq_token_begin[p.num_seqs] = begin;
}

void shift_ids(const Context&, const ShiftIdsParams& p) {
  for (int t = 0; t < p.num_tokens; ++t) {
    const int from = t + p.shift;
    p.shifted[t] = from < p.seq_token_begin[p.token_seqs[t] + 1] ? p.ids[from] : 0;
  }
}

}  // namespace cpmcu::cpu
