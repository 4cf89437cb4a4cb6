// Acceptance of draft trees, and the tokens that the draft processes next (kernels/tree/tree.h).
#include <algorithm>
#include <atomic>

#include "kernels/tree/tree_checks.h"

namespace cpmcu::cpu {
namespace {

bool is_stop(const SlotStop& stop, int token) {
  const int* end = stop.stop_ids + std::min(stop.num_stop_ids, kMaxStopIds);
  return std::find(stop.stop_ids, end, token) != end;
}

// The child of the node that holds the token, or -1.
int child_of(const TokenTrees& trees, int seq, int node, int token) {
  for (int i = 1; i < trees.num_nodes; ++i) {
    const int at = seq * trees.num_nodes + i;
    if (trees.parents[at] == node && trees.tokens[at] == token) return i;
  }
  return -1;
}

// The child of the node at which top-p verification continues, or -1.
int accepted_child(const AcceptTreeParams& p, int seq, int node) {
  const int num_nodes = p.trees.num_nodes, row = seq * num_nodes + node;
  const TokenCandidates& candidates = p.candidates[row];
  const auto with_candidate = [&](int i) {
    const int token = candidates.ids[i];
    return token == kNoToken ? -1 : child_of(p.trees, seq, node, token);
  };
  int child = child_of(p.trees, seq, node, p.drawn[row]);
  for (int i = 0; i < candidates.num && child < 0; ++i) child = with_candidate(i);
  if (child >= 0) return child;
  child = with_candidate(1);
  int last = child;
  for (int i = 0; i < p.verify_window && last >= 0; ++i) {
    const int first = p.candidates[seq * num_nodes + last].ids[0];
    last = first == kNoToken ? -1 : child_of(p.trees, seq, last, first);
  }
  return last < 0 ? -1 : child;
}

// The log-probability of a token that is the drawn one or a candidate.
float logprob_of(const AcceptTreeParams& p, int row, int token) {
  if (token != p.drawn[row]) {
    for (int i = 0; i < kMaxCandidates; ++i) {
      if (p.candidates[row].ids[i] == token) return p.candidates[row].logprobs[i];
    }
  }
  return p.logprobs[row].logprob;
}

}  // namespace

void accept_tree(const Context&, const AcceptTreeParams& p) {
  check_accept(p);
  const SlotState& state = p.state;
  const int num_nodes = p.trees.num_nodes, max_path = state.accepted.max_path;
  SlotResult* results = nullptr;
  if (p.sink.step_counter != nullptr) {
    results = p.sink.results + (*p.sink.step_counter % p.sink.ring_size) * p.sink.max_seqs;
  }
  for (int seq = 0; seq < p.trees.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    const SlotSampling& sampling = p.sampling[slot];
    SlotStop& stop = p.stops[slot];
    SlotResult* result = results == nullptr ? nullptr : results + seq;
    int* ids = state.accepted.ids + int64_t{slot} * max_path;
    int* path = state.accepted.paths + int64_t{slot} * max_path;
    const int length = state.lengths[slot];
    std::fill(path, path + max_path, -1);
    int num = 0, cached = state.next_tokens[slot];
    bool finished = stop.finished;
    for (int node = 0; node >= 0 && !finished && num < max_path; ++num) {
      const int row = seq * num_nodes + node, drawn = p.drawn[row];
      int child = -1;
      if (drawn != kNoToken) {
        child = p.candidates == nullptr ? child_of(p.trees, seq, node, drawn)
                                        : accepted_child(p, seq, node);
      }
      const int token = child < 0 ? drawn : p.trees.tokens[seq * num_nodes + child];
      if (state.history && length + num < state.max_len) {
        state.history[int64_t{slot} * state.max_len + length + num] = cached;
      }
      path[num] = node;
      ids[num] = token;
      if (result != nullptr) {
        result->tokens[num] = token;
        if (sampling.num_logprobs >= 0) {
          result->logprobs[num] = p.logprobs[row];
          result->logprobs[num].logprob = logprob_of(p, row, token);
        }
      }
      const bool is_token = token != kNoToken;
      if (is_token && sampling.use_penalties) {
        ++state.counts[int64_t{slot} * state.vocab_size + token];
      }
      finished = !is_token || is_stop(stop, token) || num + 1 >= stop.max_tokens;
      cached = token;
      node = child;
    }
    if (num > 0) {
      state.lengths[slot] = length + num;
      state.next_tokens[slot] = cached;
      stop.max_tokens -= num;
      stop.finished = finished;
    }
    state.accepted.counts[slot] = num;
    if (result == nullptr) continue;
    result->slot = slot;
    result->num_tokens = num;
    result->finished = finished;
    result->inner = p.inner == nullptr ? InnerCounts{} : p.inner[seq];
  }
  if (results == nullptr) return;
  std::atomic_thread_fence(std::memory_order_release);
  *p.sink.step_counter += 1;
  *p.sink.done = *p.sink.step_counter;
}

void begin_draft(const Context&, const BeginDraftParams& p) {
  const int max_path = p.accepted.max_path;
  p.seq_token_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], count = p.accepted.counts[slot];
    const int n = std::max(count, 1), length = p.lengths[slot] - n + (p.shifted ? 0 : 1);
    p.draft_lengths[slot] = length;
    for (int j = 0; j < max_path; ++j) {
      const int row = seq * max_path + j;
      p.ids[row] = j < count ? p.accepted.ids[slot * max_path + j] : 0;
      p.positions[row] = length + j;
      p.token_seqs[row] = seq;
      p.hidden_rows[row] = p.accepted.hidden_row(slot, p.lengths[slot] - n + j);
    }
    p.seq_token_begin[seq + 1] = (seq + 1) * max_path;
    p.last_rows[seq] = seq * max_path + n - 1;
  }
}

void shift_prompt(const Context&, const ShiftPromptParams& p) {
  p.first.seq_token_begin[0] = p.rest.seq_token_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], begin = p.seq_token_begin[seq];
    const int end = p.seq_token_begin[seq + 1], start = p.lengths[slot];
    p.first.ids[seq] = p.ids[begin];
    const int num_shared = p.num_shared == nullptr ? 0 : p.num_shared[slot];
    p.first.positions[seq] = std::max(start - 1, num_shared);
    p.first.token_seqs[seq] = seq;
    p.first.hidden_rows[seq] = slot * p.max_path + std::max(start - 1, 0) % p.max_path;
    p.first.seq_token_begin[seq + 1] = seq + 1;
    p.first_lengths[slot] = std::max(start - 1, num_shared);
    for (int row = begin + 1; row < end; ++row) {
      const int to = row - seq - 1;
      p.rest.ids[to] = p.ids[row];
      p.rest.positions[to] = start + row - 1 - begin;
      p.rest.token_seqs[to] = seq;
      p.rest.hidden_rows[to] = row - 1;
    }
    p.rest.seq_token_begin[seq + 1] = end - seq - 1;
  }
}

}  // namespace cpmcu::cpu
