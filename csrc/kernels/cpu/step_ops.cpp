#include "kernels/step_ops.h"

#include <algorithm>
#include <atomic>

namespace cpmcu::cpu {

void begin_decode(const Context&, const BeginDecodeParams& p) {
  p.seq_row_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    p.ids[seq] = p.state.next_tokens[slot];
    p.positions[seq] = p.state.lengths[slot];
    p.row_seqs[seq] = seq;
    p.seq_row_begin[seq + 1] = seq + 1;
  }
}

void finish_step(const Context&, const FinishStepParams& p) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    p.state.lengths[p.seq_slots[seq]] += p.seq_row_begin[seq + 1] - p.seq_row_begin[seq];
  }
  SlotResult* results = p.results + (*p.ticket % p.ring_size) * p.max_seqs;
  for (int r = 0; r < p.num_sampled; ++r) {
    const int slot = p.seq_slots[p.sampled_seqs[r]], token = p.tokens[r];
    p.state.next_tokens[slot] = token;
    if (token != kNoToken && p.sampling[slot].use_penalties) {
      ++p.state.counts[int64_t{slot} * p.state.vocab_size + token];
    }
    results[r].slot = slot;
    results[r].num_tokens = 1;
    results[r].finished = 0;
    results[r].tokens[0] = token;
    if (p.sampling[slot].num_logprobs >= 0) results[r].logprobs[0] = p.logprobs[r];
  }
  std::atomic_thread_fence(std::memory_order_release);
  *p.ticket += 1;
  *p.done = *p.ticket;
}

void seed_pending(const Context&, const SeedPendingParams& p) {
  for (int r = 0; r < p.num_sampled; ++r) {
    const int slot = p.sampled_slots[r];
    p.pending_ids[int64_t{slot} * p.max_pending] = p.tokens[r];
    p.pending_counts[slot] = 1;
  }
}

void reset_slot(const Context&, const ResetSlotParams& p) {
  const int vocab_size = p.state.vocab_size;
  int* counts = p.state.counts + int64_t{p.slot} * vocab_size;
  p.state.lengths[p.slot] = 0;
  std::fill(counts, counts + vocab_size, 0);
  for (int i = 0; i < p.num_ids; ++i) {
    const int id = p.ids[i];
    if (id < 0 || id >= vocab_size) continue;
    if (i < p.num_prompt) {
      counts[id] |= kPromptBit;
    } else {
      ++counts[id];
    }
  }
}

}  // namespace cpmcu::cpu
