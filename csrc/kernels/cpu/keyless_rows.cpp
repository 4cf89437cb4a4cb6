// keyless_rows (kernels/tree/keyless_rows.h).
#include "kernels/tree/keyless_rows.h"

#include <algorithm>

namespace cpmcu::cpu {

void keyless_rows(const Context&, const KeylessRowsParams& p) {
  check_keyless_rows(p);
  p.seq_token_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], length = p.lengths[slot];
    for (int row = seq * p.num_rows; row < (seq + 1) * p.num_rows; ++row) {
      p.row_slots[row] = slot;
      p.positions[row] = length;
      p.token_seqs[row] = row;
      p.masks[row] = 0;
      p.seq_token_begin[row + 1] = row + 1;
    }
    p.root_ids[seq] = p.next_tokens[slot];
    p.hidden_rows[seq] = p.accepted.hidden_row(slot, length - 1);
    p.draft_lengths[slot] = length - std::max(p.accepted.counts[slot], 1);
  }
}

}  // namespace cpmcu::cpu
