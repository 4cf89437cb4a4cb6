// The target's side of a tree: acceptance, and what the draft runs next (kernels/tree.h).
//
// Latency-bound. Acceptance is one block, because it publishes for all sequences; a warp walks one
// tree, each lane holding two nodes, so that a step of the walk is two votes. Publication as in
// step_ops.cu.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAcceptWarps = 16;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kMaxTreeSize == 64, "a lane holds two nodes");
static_assert(kMaxStopIds <= 32 && kMaxLogprobs <= 32, "a lane has at most one of them");

// ---- kernels

// What a walk found, in shared memory of its warp.
struct Walk {
  int path[kMaxTreeSize];
  int emitted[kMaxTreeSize];
};

// The element of node `node` of two that each lane holds.
__device__ __forceinline__ int of_node(const int (&values)[2], int node) {
  const int low = __shfl_sync(kAllLanes, values[0], node % 32);
  const int high = __shfl_sync(kAllLanes, values[1], node % 32);
  return node < 32 ? low : high;
}

// Fills `walk`; returns the number of tokens emitted and whether the sequence has ended.
__device__ int walk_tree(const AcceptTreeParams& p, int seq, const SlotStop& stop, int lane,
                         Walk& walk, bool& finished) {
  int tokens[2], parents[2], drawn[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int node = i * 32 + lane, at = seq * p.trees.num_nodes + node;
    const bool exists = node < p.trees.num_nodes;
    tokens[i] = exists ? p.trees.tokens[at] : -1;
    parents[i] = exists ? p.trees.parents[at] : -1;
    drawn[i] = exists ? p.drawn[at] : 0;
  }
  const int stop_id = lane < min(stop.num_stop_ids, kMaxStopIds) ? stop.stop_ids[lane] : -1;
  const int max_tokens = stop.max_tokens;
  for (int num = 0, node = 0;;) {
    const int token = of_node(drawn, node);
    if (lane == 0) {
      walk.path[num] = node;
      walk.emitted[num] = token;
    }
    ++num;
    finished = token == kNoToken || num >= max_tokens ||
               __any_sync(kAllLanes, stop_id == token && stop_id >= 0);
    const unsigned low = __ballot_sync(kAllLanes, parents[0] == node && tokens[0] == token);
    const unsigned high = __ballot_sync(kAllLanes, parents[1] == node && tokens[1] == token);
    if (finished || num == p.max_emitted || (low | high) == 0) return num;
    node = low != 0 ? __ffs(low) - 1 : 32 + __ffs(high) - 1;
  }
}

__device__ void publish_logprobs(const TokenLogprobs& from, TokenLogprobs& to, int num_logprobs,
                                 int lane) {
  if (lane == 0) to.logprob = from.logprob;
  if (lane < min(num_logprobs, kMaxLogprobs)) {
    to.top_ids[lane] = from.top_ids[lane];
    to.top_logprobs[lane] = from.top_logprobs[lane];
  }
}

// One warp does one sequence.
__device__ void accept_one(const AcceptTreeParams& p, int seq, SlotResult& result, Walk& walk,
                           int lane) {
  const int slot = p.seq_slots[seq];
  SlotStop& stop = p.stops[slot];
  const int length = p.state.lengths[slot], root = p.state.next_tokens[slot];
  const int max_tokens = stop.max_tokens;
  bool finished = stop.finished != 0;
  const int num = finished ? 0 : walk_tree(p, seq, stop, lane, walk, finished);
  __syncwarp();

  const bool counts_tokens = p.sampling[slot].use_penalties != 0;
  for (int j = lane; j < p.max_emitted; j += 32) {
    const int node = j < num ? walk.path[j] : -1;
    p.paths[seq * p.max_emitted + j] = node;
    if (node < 0) continue;
    const int token = walk.emitted[j];
    result.tokens[j] = token;
    if (p.pending_ids) p.pending_ids[slot * p.max_emitted + j] = token;
    if (p.state.history && length + j < p.state.max_len) {
      p.state.history[int64_t{slot} * p.state.max_len + length + j] =
          j == 0 ? root : walk.emitted[j - 1];
    }
    // A path may repeat a token, hence the atomic; of integers, so the order does not matter.
    if (counts_tokens && token != kNoToken)
      atomicAdd(p.state.counts + int64_t{slot} * p.state.vocab_size + token, 1);
  }
  const int num_logprobs = p.sampling[slot].num_logprobs;
  for (int j = 0; num_logprobs >= 0 && j < num; ++j) {
    publish_logprobs(p.logprobs[seq * p.trees.num_nodes + walk.path[j]], result.logprobs[j],
                     num_logprobs, lane);
  }
  if (lane == 0) {
    p.num_emitted[seq] = num;
    result.slot = slot;
    result.num_tokens = num;
    result.finished = finished ? 1 : 0;
    if (num > 0) {
      p.state.lengths[slot] = length + num;
      p.state.next_tokens[slot] = walk.emitted[num - 1];
      stop.max_tokens = max_tokens - num;
      stop.finished = finished ? 1 : 0;
      if (p.pending_counts) p.pending_counts[slot] = num;
    }
  }
  __syncwarp();  // the walk's memory may be used again
}

// Grid: 1.
__global__ void __launch_bounds__(kAcceptWarps * 32)
    accept_tree_kernel(const __grid_constant__ AcceptTreeParams p) {
  __shared__ Walk walks[kAcceptWarps];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const uint64_t ticket = *p.ticket;
  SlotResult* results = p.results + (ticket % p.ring_size) * p.max_seqs;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int seq = warp; seq < p.trees.num_seqs; seq += kAcceptWarps) {
    accept_one(p, seq, results[seq], walks[warp], lane);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *p.ticket = ticket + 1;
    ptx::store_release_system(p.done, ticket + 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    begin_draft_kernel(const __grid_constant__ BeginDraftParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row == 0) p.seq_row_begin[0] = 0;
  if (row >= p.num_seqs * p.max_pending) return;
  const int seq = row / p.max_pending, j = row % p.max_pending;
  const int slot = p.seq_slots[seq], count = p.pending_counts[slot];
  p.ids[row] = j < count ? p.pending_ids[slot * p.max_pending + j] : 0;
  p.positions[row] = p.draft_lengths[slot] + j;
  p.row_seqs[row] = seq;
  p.feature_rows[row] = slot * p.max_pending + j;
  if (j == 0) {
    p.seq_row_begin[seq + 1] = row + p.max_pending;
    p.last_rows[seq] = row + max(count - 1, 0);
  }
}

__global__ void __launch_bounds__(kThreads)
    skip_draft_kernel(const __grid_constant__ SkipDraftParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x * kThreads + threadIdx.x;
  if (seq >= p.num_seqs) return;
  const int slot = p.seq_slots[seq];
  p.draft_lengths[slot] += p.pending_counts[slot];
  p.pending_counts[slot] = 0;
}

dim3 blocks_for(int count) { return dim3((count + kThreads - 1) / kThreads); }

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: all but the sizes. Publishes also where there is no sequence.
void accept_tree(const Context& ctx, const AcceptTreeParams& p) {
  check_accept(p);
  launch(ctx, accept_tree_kernel, dim3(1), dim3(kAcceptWarps * 32), 0, p);
}

// Graph-safe; reads from the device: seq_slots, pending_ids, pending_counts, draft_lengths.
void begin_draft(const Context& ctx, const BeginDraftParams& p) {
  if (p.num_seqs == 0) return;
  launch(ctx, begin_draft_kernel, blocks_for(p.num_seqs * p.max_pending), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: seq_slots, pending_counts, draft_lengths.
void skip_draft(const Context& ctx, const SkipDraftParams& p) {
  if (p.num_seqs == 0) return;
  launch(ctx, skip_draft_kernel, blocks_for(p.num_seqs), dim3(kThreads), 0, p);
}

}  // namespace cpmcu::cuda
