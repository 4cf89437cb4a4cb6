// accept_tree, begin_draft and shift_prompt (kernels/tree/tree.h).
//
// Roofline: latency.
//
// Schedule of accept_tree: one CTA, because it publishes the results of all sequences. One warp
// walks one tree. Each lane holds two nodes, so a step of the walk takes two votes. Results are
// published as in step_ops.cu.
//
// Top-p verification: the first two rules (tree.h) rank the children of a node by the node's drawn
// token and candidates. So each lane ranks its nodes before the walk, and a step of the walk is one
// minimum. Only the third rule needs votes.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/tree/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAcceptWarps = 16;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kMaxTreeSize == 64, "a lane holds two nodes");
static_assert(kMaxStopIds <= 32 && kMaxLogprobs <= 32, "a lane has at most one of them");

// ---- kernels

// The result of a walk, in shared memory of its warp.
struct Walk {
  int path[kMaxTreeSize];
  int emitted[kMaxTreeSize];
};

// The value of node `node`. Each lane holds the values of nodes lane and 32 + lane.
__device__ __forceinline__ int of_node(const int (&values)[2], int node) {
  const int low = __shfl_sync(kAllLanes, values[0], node % 32);
  const int high = __shfl_sync(kAllLanes, values[1], node % 32);
  return node < 32 ? low : high;
}

// The nodes of a tree: each lane holds nodes lane and 32 + lane. A node that is absent, or has no
// token, has parent -1.
struct LaneNodes {
  int tokens[2], parents[2], drawn[2];

  __device__ __forceinline__ LaneNodes(const AcceptTreeParams& p, int seq, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int node = i * 32 + lane, at = seq * p.trees.num_nodes + node;
      const bool exists = node < p.trees.num_nodes;
      tokens[i] = exists ? p.trees.tokens[at] : -1;
      parents[i] = exists && tokens[i] >= 0 ? p.trees.parents[at] : -1;
      drawn[i] = exists ? p.drawn[at] : 0;
    }
  }
  // The first wanted child of `node`; -1: none.
  __device__ __forceinline__ int child_of(int node, bool wants_low, bool wants_high) const {
    const unsigned low = __ballot_sync(kAllLanes, parents[0] == node && wants_low);
    const unsigned high = __ballot_sync(kAllLanes, parents[1] == node && wants_high);
    return low != 0 ? __ffs(low) - 1 : high != 0 ? 31 + __ffs(high) : -1;
  }
};

// Fills `walk` and returns the number of emitted tokens. `finished`: the sequence has ended.
// next(node, token) returns the child at which the walk continues, -1 for none, and sets `token` to
// what the node emits.
template <typename Next>
__device__ __forceinline__ int walk_from_root(const AcceptTreeParams& p, const SlotStop& stop,
                                              int lane, Walk& walk, bool& finished, Next next) {
  const int stop_id = lane < min(stop.num_stop_ids, kMaxStopIds) ? stop.stop_ids[lane] : -1;
  const int max_tokens = stop.max_tokens;
  for (int num = 0, node = 0;;) {
    int token;
    const int child = next(node, token);
    if (lane == 0) {
      walk.path[num] = node;
      walk.emitted[num] = token;
    }
    ++num;
    finished = token == kNoToken || num >= max_tokens ||
               __any_sync(kAllLanes, stop_id == token && stop_id >= 0);
    if (finished || num == p.state.accepted.max_path || child < 0) return num;
    node = child;
  }
}

// The walk accepts the child that has the drawn token.
__device__ int walk_tree(const AcceptTreeParams& p, int seq, const SlotStop& stop, int lane,
                         Walk& walk, bool& finished) {
  const LaneNodes nodes(p, seq, lane);
  return walk_from_root(p, stop, lane, walk, finished, [&](int node, int& token) {
    token = of_node(nodes.drawn, node);
    return nodes.child_of(node, nodes.tokens[0] == token, nodes.tokens[1] == token);
  });
}

// The walk of top-p verification.
__device__ int walk_candidates(const AcceptTreeParams& p, int seq, const SlotStop& stop, int lane,
                               Walk& walk, bool& finished) {
  constexpr unsigned kNone = ~0u;
  const LaneNodes nodes(p, seq, lane);
  unsigned order[2];  // children of a node in the order in which they are accepted; kNone: rejected
  bool is_first[2], is_second[2];  // the child's token is the parent's first or second candidate
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int node = i * 32 + lane;
    // The order of nodes without a parent is not used.
    const int parent_row = seq * p.trees.num_nodes + max(nodes.parents[i], 0);
    const TokenCandidates& candidates = p.candidates[parent_row];
    const int num = candidates.num;
    order[i] = kNone;
#pragma unroll
    for (int j = kMaxCandidates - 1; j >= 0; --j) {
      const bool equal = candidates.ids[j] == nodes.tokens[i];
      if (equal && j < num) order[i] = (j + 1) * kMaxTreeSize + node;
      if (j == 0) is_first[i] = equal;
      if (j == 1) is_second[i] = equal;
    }
    if (p.drawn[parent_row] == nodes.tokens[i]) order[i] = node;
  }
  return walk_from_root(p, stop, lane, walk, finished, [&](int node, int& token) {
    const unsigned low = nodes.parents[0] == node ? order[0] : kNone;
    const unsigned high = nodes.parents[1] == node ? order[1] : kNone;
    const unsigned best = __reduce_min_sync(kAllLanes, min(low, high));
    int child = best == kNone ? -1 : static_cast<int>(best % kMaxTreeSize);
    if (child < 0) {
      int last = child = nodes.child_of(node, is_second[0], is_second[1]);
      for (int i = 0; i < p.verify_window && last >= 0; ++i) {
        last = nodes.child_of(last, is_first[0], is_first[1]);
      }
      if (last < 0) child = -1;
    }
    token = child < 0 ? of_node(nodes.drawn, node) : of_node(nodes.tokens, child);
    return child;
  });
}

// The log-probability of a token that is the drawn one or a candidate.
__device__ float logprob_of(const AcceptTreeParams& p, int row, int token) {
  if (token != p.drawn[row]) {
    const TokenCandidates& candidates = p.candidates[row];
    for (int i = 0; i < kMaxCandidates; ++i) {
      if (candidates.ids[i] == token) return candidates.logprobs[i];
    }
  }
  return p.logprobs[row].logprob;
}

__device__ void publish_logprobs(const TokenLogprobs& from, TokenLogprobs& to, float logprob,
                                 int num_logprobs, int lane) {
  if (lane == 0) to.logprob = logprob;
  if (lane < min(num_logprobs, kMaxLogprobs)) {
    to.top_ids[lane] = from.top_ids[lane];
    to.top_logprobs[lane] = from.top_logprobs[lane];
  }
}

// One warp handles one sequence. `result` is null if nothing is published.
template <bool kTopP>
__device__ void accept_one(const AcceptTreeParams& p, int seq, SlotResult* result, Walk& walk,
                           int lane) {
  const int slot = p.seq_slots[seq], max_path = p.state.accepted.max_path;
  SlotStop& stop = p.stops[slot];
  const int length = p.state.lengths[slot], root = p.state.next_tokens[slot];
  const int max_tokens = stop.max_tokens;
  bool finished = stop.finished != 0;
  int num = 0;
  if (!finished) {
    num = kTopP ? walk_candidates(p, seq, stop, lane, walk, finished)
                : walk_tree(p, seq, stop, lane, walk, finished);
  }
  __syncwarp();

  const bool counts_tokens = p.sampling[slot].use_penalties != 0;
  for (int j = lane; j < max_path; j += 32) {
    const int node = j < num ? walk.path[j] : -1;
    p.state.accepted.paths[slot * max_path + j] = node;
    if (node < 0) continue;
    const int token = walk.emitted[j];
    if (result) result->tokens[j] = token;
    p.state.accepted.ids[slot * max_path + j] = token;
    if (p.state.history && length + j < p.state.max_len) {
      p.state.history[int64_t{slot} * p.state.max_len + length + j] =
          j == 0 ? root : walk.emitted[j - 1];
    }
    // A path may repeat a token, so the update is atomic. Integer sums do not depend on the order.
    if (counts_tokens && token != kNoToken)
      atomicAdd(p.state.counts + int64_t{slot} * p.state.vocab_size + token, 1);
  }
  const int num_logprobs = result ? p.sampling[slot].num_logprobs : -1;
  for (int j = 0; num_logprobs >= 0 && j < num; ++j) {
    const int row = seq * p.trees.num_nodes + walk.path[j];
    const float logprob = kTopP ? logprob_of(p, row, walk.emitted[j]) : p.logprobs[row].logprob;
    publish_logprobs(p.logprobs[row], result->logprobs[j], logprob, num_logprobs, lane);
  }
  if (lane == 0) {
    p.state.accepted.counts[slot] = num;
    if (result) {
      result->slot = slot;
      result->num_tokens = num;
      result->finished = finished ? 1 : 0;
      result->inner = p.inner ? p.inner[seq] : InnerCounts{};
    }
    if (num > 0) {
      p.state.lengths[slot] = length + num;
      p.state.next_tokens[slot] = walk.emitted[num - 1];
      stop.max_tokens = max_tokens - num;
      stop.finished = finished ? 1 : 0;
    }
  }
  __syncwarp();  // before the next walk overwrites `walk`
}

// Grid: 1.
template <bool kTopP>
__global__ void __launch_bounds__(kAcceptWarps * 32)
    accept_tree_kernel(const __grid_constant__ AcceptTreeParams p) {
  __shared__ Walk walks[kAcceptWarps];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const bool publishes = p.sink.step_counter != nullptr;
  const uint64_t num_steps = publishes ? *p.sink.step_counter : 0;
  SlotResult* results = p.sink.results + (num_steps % p.sink.ring_size) * p.sink.max_seqs;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int seq = warp; seq < p.trees.num_seqs; seq += kAcceptWarps) {
    accept_one<kTopP>(p, seq, publishes ? results + seq : nullptr, walks[warp], lane);
  }
  if (!publishes) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    *p.sink.step_counter = num_steps + 1;
    ptx::store_release_system(p.sink.done, num_steps + 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    begin_draft_kernel(const __grid_constant__ BeginDraftParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x, max_path = p.accepted.max_path;
  if (row == 0) p.seq_token_begin[0] = 0;
  if (row >= p.num_seqs * max_path) return;
  const int seq = row / max_path, j = row % max_path;
  const int slot = p.seq_slots[seq], count = p.accepted.counts[slot], n = max(count, 1);
  const int length = p.lengths[slot] - n + (p.shifted ? 0 : 1);
  p.ids[row] = j < count ? p.accepted.ids[slot * max_path + j] : 0;
  p.positions[row] = length + j;
  p.token_seqs[row] = seq;
  p.hidden_rows[row] = p.accepted.hidden_row(slot, p.lengths[slot] - n + j);
  if (j == 0) {
    p.draft_lengths[slot] = length;
    p.seq_token_begin[seq + 1] = row + max_path;
    p.last_rows[seq] = row + n - 1;
  }
}

// One thread for each token of the chunk. The thread of a sequence's first token writes the values
// that exist once for each sequence.
__global__ void __launch_bounds__(kThreads)
    shift_prompt_kernel(const __grid_constant__ ShiftPromptParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row == 0) p.first.seq_token_begin[0] = p.rest.seq_token_begin[0] = 0;
  if (row >= p.num_tokens) return;
  const int seq = p.token_seqs[row], slot = p.seq_slots[seq];
  const int begin = p.seq_token_begin[seq], start = p.lengths[slot];
  if (row > begin) {
    const int to = row - seq - 1;
    p.rest.ids[to] = p.ids[row];
    p.rest.positions[to] = start + row - 1 - begin;
    p.rest.token_seqs[to] = seq;
    p.rest.hidden_rows[to] = row - 1;
    return;
  }
  const int end = p.seq_token_begin[seq + 1];
  p.first.ids[seq] = p.ids[row];
  const int num_shared = p.num_shared == nullptr ? 0 : p.num_shared[slot];
  p.first.positions[seq] = max(start - 1, num_shared);
  p.first.token_seqs[seq] = seq;
  p.first.hidden_rows[seq] = slot * p.max_path + max(start - 1, 0) % p.max_path;
  p.first.seq_token_begin[seq + 1] = seq + 1;
  p.first_lengths[slot] = max(start - 1, num_shared);
  p.rest.seq_token_begin[seq + 1] = end - seq - 1;
}

dim3 ctas_for(int count) { return dim3((count + kThreads - 1) / kThreads); }

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: all but the sizes. Publishes even if there are no sequences.
void accept_tree(const Context& ctx, const AcceptTreeParams& p) {
  check_accept(p);
  const auto kernel =
      p.candidates == nullptr ? accept_tree_kernel<false> : accept_tree_kernel<true>;
  launch(ctx, kernel, dim3(1), dim3(kAcceptWarps * 32), 0, p);
}

// Graph-safe; reads from the device: seq_slots, lengths, accepted.
void begin_draft(const Context& ctx, const BeginDraftParams& p) {
  if (p.num_seqs == 0) return;
  launch(ctx, begin_draft_kernel, ctas_for(p.num_seqs * p.accepted.max_path), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: ids, token_seqs, seq_slots, seq_token_begin, lengths.
void shift_prompt(const Context& ctx, const ShiftPromptParams& p) {
  if (p.num_tokens == 0) return;
  launch(ctx, shift_prompt_kernel, ctas_for(p.num_tokens), dim3(kThreads), 0, p);
}

}  // namespace cpmcu::cuda
