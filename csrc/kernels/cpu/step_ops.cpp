#include "kernels/step/step_ops.h"

#include <algorithm>
#include <atomic>

namespace cpmcu::cpu {

void finish_step(const Context&, const FinishStepParams& p) {
  const SlotState& state = p.state;
  if (state.history != nullptr) {
    for (int row = 0; row < p.num_tokens; ++row) {
      const int seq = p.token_seqs[row], slot = p.seq_slots[seq];
      const int at = state.lengths[slot] + row - p.seq_token_begin[seq];
      if (at < state.max_len) state.history[int64_t{slot} * state.max_len + at] = p.ids[row];
    }
  }
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    state.lengths[p.seq_slots[seq]] += p.seq_token_begin[seq + 1] - p.seq_token_begin[seq];
  }
  SlotResult* results =
      p.sink.results + (*p.sink.step_counter % p.sink.ring_size) * p.sink.max_seqs;
  for (int r = 0; r < p.num_sampled; ++r) {
    const int slot = p.seq_slots[p.sampled_seqs[r]], token = p.tokens[r];
    state.next_tokens[slot] = token;
    const int64_t path = int64_t{slot} * state.accepted.max_path;
    state.accepted.ids[path] = token;
    state.accepted.paths[path] = -1;
    state.accepted.counts[slot] = 1;
    if (token != kNoToken && p.sampling[slot].use_penalties) {
      ++state.counts[int64_t{slot} * state.vocab_size + token];
    }
    results[r].slot = slot;
    results[r].num_tokens = 1;
    results[r].finished = 0;
    results[r].tokens[0] = token;
    if (p.sampling[slot].num_logprobs >= 0) results[r].logprobs[0] = p.logprobs[r];
  }
  std::atomic_thread_fence(std::memory_order_release);
  *p.sink.step_counter += 1;
  *p.sink.done = *p.sink.step_counter;
}

void reset_slot(const Context&, const ResetSlotParams& p) {
  const int vocab_size = p.state.vocab_size;
  int* counts = p.state.counts + int64_t{p.slot} * vocab_size;
  p.state.lengths[p.slot] = p.num_cached;
  if (p.state.num_shared != nullptr) p.state.num_shared[p.slot] = p.num_cached;
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
