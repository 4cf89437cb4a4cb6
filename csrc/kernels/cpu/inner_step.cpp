#include "kernels/tree/inner_step.h"

#include <algorithm>

namespace cpmcu::cpu {

void begin_inner(const Context&, const BeginInnerParams& p) {
  check_begin_inner(p);
  const int max_path = p.accepted.max_path;
  const Accepted& inner = p.inner.accepted;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], length = p.lengths[slot];
    const int count = p.accepted.counts[slot], n = std::max(count, 1);
    for (int j = 0; j < max_path; ++j) {
      const int at = slot * max_path + j, row = seq * max_path + j;
      p.rows[row] = j < n ? row : -1;
      p.slot_rows[row] = j < n ? inner.hidden_row(slot, length - n + 1 + j) : -1;
      inner.paths[at] = -1;
      inner.ids[at] = j < count ? p.accepted.ids[at] : j == n ? p.first_tokens[seq] : 0;
      if (j < p.num_tokens) p.chain[seq * p.num_tokens + j] = j == 0 ? p.first_tokens[seq] : -1;
    }
    p.counts[seq] = {};
    inner.counts[slot] = n + 1;
    p.inner.lengths[slot] = length + 1;
    p.inner.next_tokens[slot] = p.first_tokens[seq];
    p.stops[slot] = {.max_tokens = p.num_tokens - 1, .finished = p.num_tokens == 1};
  }
}

void extend_chain(const Context&, const ExtendChainParams& p) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], count = p.accepted.counts[slot];
    int* chain = p.chain + seq * p.num_tokens;
    p.counts[seq].steps += count > 0;
    p.counts[seq].tokens += count;
    const int first = p.num_tokens - p.stops[slot].max_tokens - count;
    for (int j = 0; j < count; ++j) {
      chain[first + j] = p.accepted.ids[slot * p.accepted.max_path + j];
    }
  }
}

}  // namespace cpmcu::cpu
