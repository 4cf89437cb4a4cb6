// The target's side of a tree: acceptance, and what the draft runs next (kernels/tree.h).
#include <algorithm>
#include <atomic>

#include "kernels/tree_checks.h"

namespace cpmcu::cpu {
namespace {

bool is_stop(const SlotStop& stop, int token) {
  const int* end = stop.stop_ids + std::min(stop.num_stop_ids, kMaxStopIds);
  return std::find(stop.stop_ids, end, token) != end;
}

// The node's child that holds the token, or -1.
int child_of(const TokenTrees& trees, int seq, int node, int token) {
  for (int i = 1; i < trees.num_nodes; ++i) {
    const int at = seq * trees.num_nodes + i;
    if (trees.parents[at] == node && trees.tokens[at] == token) return i;
  }
  return -1;
}

}  // namespace

void accept_tree(const Context&, const AcceptTreeParams& p) {
  check_accept(p);
  const int num_nodes = p.trees.num_nodes;
  SlotResult* results = p.results + (*p.ticket % p.ring_size) * p.max_seqs;
  for (int seq = 0; seq < p.trees.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    const SlotSampling& sampling = p.sampling[slot];
    SlotStop& stop = p.stops[slot];
    SlotResult& result = results[seq];
    int* path = p.paths + seq * p.max_emitted;
    const int length = p.state.lengths[slot];
    std::fill(path, path + p.max_emitted, -1);
    int num = 0, cached = p.state.next_tokens[slot];
    bool finished = stop.finished;
    for (int node = 0; node >= 0 && !finished && num < p.max_emitted; ++num) {
      const int row = seq * num_nodes + node, token = p.drawn[row];
      if (p.state.history && length + num < p.state.max_len) {
        p.state.history[int64_t{slot} * p.state.max_len + length + num] = cached;
      }
      path[num] = node;
      if (p.pending_ids) p.pending_ids[slot * p.max_emitted + num] = token;
      result.tokens[num] = token;
      if (sampling.num_logprobs >= 0) result.logprobs[num] = p.logprobs[row];
      const bool is_token = token != kNoToken;
      if (is_token && sampling.use_penalties)
        ++p.state.counts[int64_t{slot} * p.state.vocab_size + token];
      finished = !is_token || is_stop(stop, token) || num + 1 >= stop.max_tokens;
      cached = token;
      node = child_of(p.trees, seq, node, token);
    }
    if (num > 0) {
      p.state.lengths[slot] = length + num;
      p.state.next_tokens[slot] = cached;
      stop.max_tokens -= num;
      stop.finished = finished;
      if (p.pending_counts) p.pending_counts[slot] = num;
    }
    p.num_emitted[seq] = num;
    result.slot = slot;
    result.num_tokens = num;
    result.finished = finished;
  }
  std::atomic_thread_fence(std::memory_order_release);
  *p.ticket += 1;
  *p.done = *p.ticket;
}

void begin_draft(const Context&, const BeginDraftParams& p) {
  p.seq_row_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], count = p.pending_counts[slot];
    for (int j = 0; j < p.max_pending; ++j) {
      const int row = seq * p.max_pending + j;
      p.ids[row] = j < count ? p.pending_ids[slot * p.max_pending + j] : 0;
      p.positions[row] = p.draft_lengths[slot] + j;
      p.row_seqs[row] = seq;
      p.feature_rows[row] = slot * p.max_pending + j;
    }
    p.seq_row_begin[seq + 1] = (seq + 1) * p.max_pending;
    p.last_rows[seq] = seq * p.max_pending + std::max(count - 1, 0);
  }
}

void skip_draft(const Context&, const SkipDraftParams& p) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    p.draft_lengths[slot] += p.pending_counts[slot];
    p.pending_counts[slot] = 0;
  }
}

}  // namespace cpmcu::cpu
