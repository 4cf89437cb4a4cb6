// tree_expand, draft_select and tree_build (kernels/tree/tree.h). One CTA for each sequence.
//
// Roofline: latency, a few microseconds.
//
// Schedule of a selection among up to 2080 candidates:
//   1. Each thread holds a few candidates as integer keys.
//   2. A binary search by CTA-wide votes finds the smallest selected key (about 20 barriers).
//   3. The selected keys (at most 63) are ranked by counting larger keys.
// With at most 64 candidates, step 3 ranks all of them directly.
//
// Surprising: keys are distinct integers in the order of the scores, so the selection is exact and
// does not depend on the order of threads.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxNewCandidates = kMaxTopk * kMaxTopk;
// k + (D - 1) k^2, where k (D - 1) <= kMaxTreeSize
constexpr int kMaxCandidates = (1 + kMaxTreeSize) * kMaxTopk;

constexpr int keys_of_thread(int num_keys) { return (num_keys + kThreads - 1) / kThreads; }

struct Ranking {
  uint64_t found[kMaxTreeSize];
  uint64_t best[kMaxTreeSize];  // the best keys in descending order
  int num_found;
};

// ---- kernels

__device__ __forceinline__ uint64_t bit(int i) { return uint64_t{1} << i; }

// Writes a node, and the token that verifies it in the step.
__device__ void write_node(const TokenTrees& trees, int seq, int node, int token, int parent,
                           int depth, uint64_t mask, int slot, int length) {
  const int row = seq * trees.num_nodes + node;
  trees.tokens[row] = token;
  trees.parents[row] = parent;
  trees.depths[row] = depth;
  trees.masks[row] = mask;
  trees.token_ids[row] = max(token, 0);
  trees.token_positions[row] = length + depth;
  trees.token_slots[row] = slot;
  trees.token_seqs[row] = seq;
  if (row == 0) trees.seq_token_begin[0] = 0;
  if (node == 0) trees.seq_token_begin[seq + 1] = row + trees.num_nodes;
}

// Ranks the `wanted` largest of num_keys distinct keys. Thread t holds keys t, t + kThreads, ...
template <int kKeys>
__device__ void rank_best(const uint64_t (&keys)[kKeys], int num_keys, int wanted,
                          Ranking& ranking) {
  if (num_keys <= kMaxTreeSize) {
    if (threadIdx.x < num_keys) ranking.found[threadIdx.x] = keys[0];
    __syncthreads();
    if (threadIdx.x < num_keys) {
      int rank = 0;
      for (int i = 0; i < num_keys; ++i) rank += ranking.found[i] > keys[0] ? 1 : 0;
      if (rank < wanted) ranking.best[rank] = keys[0];
    }
    __syncthreads();
    return;
  }
  if (threadIdx.x == 0) ranking.num_found = 0;
  const uint64_t cut = find_cut(wanted, [&](uint64_t least) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i * kThreads < num_keys) count += __syncthreads_count(keys[i] >= least);
    }
    return count;
  });
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (keys[i] == 0 || keys[i] < cut) continue;
    ranking.found[atomicAdd(&ranking.num_found, 1)] = keys[i];
  }
  __syncthreads();
  if (threadIdx.x < wanted) {
    const uint64_t mine = ranking.found[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < wanted; ++i) rank += ranking.found[i] > mine ? 1 : 0;
    ranking.best[rank] = mine;
  }
  __syncthreads();
}

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    tree_expand_kernel(const __grid_constant__ TreeExpandParams p) {
  __shared__ Ranking ranking;
  ptx::pdl_launch();
  ptx::pdl_wait();
  const DraftBeam& beam = p.beam;
  const int seq = blockIdx.x, k = beam.topk, level = p.level;
  const int num_new = level == 0 ? k : k * k;
  const int first = level == 0 ? 0 : k + (level - 1) * k * k;
  const int all_begin = seq * num_candidates(k, beam.depth) + first;
  float* scores = beam.scores + all_begin;
  int* tokens = beam.tokens + all_begin;
  const int slot = p.seq_slots[seq];
  const int length = p.draft_lengths[slot] + (level == 0 ? max(p.accepted_counts[slot], 1) : 0);

  constexpr int kKeys = keys_of_thread(kMaxNewCandidates);
  uint64_t keys[kKeys] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int candidate = i * kThreads + threadIdx.x;
    if (candidate >= num_new) break;
    const float parent_score = level == 0 ? 0.0f : beam.token_scores[seq * k + candidate / k];
    const float score = parent_score + p.topk_logprobs[seq * num_new + candidate];
    scores[candidate] = score;
    tokens[candidate] = p.topk_tokens[seq * num_new + candidate];
    keys[i] = key_of(score, candidate);
  }
  if (level > 0) rank_best(keys, num_new, k, ranking);

  // Several threads read the old nodes (as parents) and the old length before they are overwritten.
  const bool has_row = threadIdx.x < k;
  const int r = threadIdx.x, row = seq * k + r;
  const int chosen = !has_row ? 0 : level == 0 ? r : token_of(ranking.best[r]);
  const int parent_row = seq * k + chosen / k;
  uint64_t mask = has_row && level > 0 ? beam.ancestor_masks[parent_row] : 0;
  __syncthreads();
  if (has_row) {
    const int own_bit = level * k + r;
    if (own_bit < kMaxTreeSize) mask |= bit(own_bit);  // the draft model never runs the last level
    beam.level_candidates[(seq * beam.depth + level) * k + r] = first + chosen;
    beam.token_scores[row] = scores[chosen];
    beam.ancestor_masks[row] = mask;
    beam.token_ids[row] = tokens[chosen];
    beam.token_parents[row] = level == 0 ? seq : parent_row;
    beam.token_positions[row] = length + level;
    beam.token_seqs[row] = seq;
  }
  if (threadIdx.x == 0) {
    if (seq == 0) beam.seq_token_begin[0] = 0;
    beam.seq_token_begin[seq + 1] = (seq + 1) * k;
    if (level == 0) p.draft_lengths[slot] = length;
  }
}

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    draft_select_kernel(const __grid_constant__ DraftSelectParams p) {
  __shared__ Ranking ranking;
  __shared__ uint8_t node_of[kMaxCandidates];  // node number of each selected candidate
  ptx::pdl_launch();
  ptx::pdl_wait();
  const DraftBeam& beam = p.beam;
  const int seq = blockIdx.x, k = beam.topk, num_tokens = p.draft.num_tokens;
  const int num_all = num_candidates(k, beam.depth), all_begin = seq * num_all;

  constexpr int kKeys = keys_of_thread(kMaxCandidates);
  uint64_t keys[kKeys] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int candidate = i * kThreads + threadIdx.x;
    if (candidate >= num_all) break;
    keys[i] = key_of(beam.scores[all_begin + candidate], candidate);
    node_of[candidate] = 0;  // invalid scores may select a child without its parent: use the root
  }
  __syncthreads();
  if (num_tokens > 0) rank_best(keys, num_all, num_tokens, ranking);

  const bool is_token = threadIdx.x < num_tokens;
  const int candidate = is_token ? token_of(ranking.best[threadIdx.x]) : 0;
  if (is_token) node_of[candidate] = static_cast<uint8_t>(threadIdx.x + 1);
  __syncthreads();
  if (!is_token) return;

  int parent = 0;
  if (candidate >= k) {
    const int level = (candidate - k) / (k * k), row = (candidate - k) % (k * k) / k;
    parent = node_of[beam.level_candidates[(seq * beam.depth + level) * k + row]];
  }
  const int at = seq * num_tokens + threadIdx.x;
  p.draft.tokens[at] = beam.tokens[all_begin + candidate];
  p.draft.parents[at] = parent;
  p.draft.scores[at] = beam.scores[all_begin + candidate];
}

// Grid: B. One thread for each node.
__global__ void __launch_bounds__(kMaxTreeSize)
    tree_build_kernel(const __grid_constant__ TreeBuildParams p) {
  __shared__ int tokens[kMaxTreeSize], parents[kMaxTreeSize];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, node = threadIdx.x;
  const int num_nodes = p.trees.num_nodes, num_tokens = p.draft.num_tokens;
  const int slot = p.seq_slots[seq];
  const int at = seq * num_tokens + node - 1;
  const bool is_drafted = node > 0 && node <= num_tokens;
  int token = node == 0 ? p.slots.next_tokens[slot] : is_drafted ? p.draft.tokens[at] : -1;
  int parent = is_drafted && p.draft.parents ? p.draft.parents[at] : node - 1;
  tokens[node] = token;
  parents[node] = parent;
  __syncthreads();
  if (node >= num_nodes) return;

  // A node is used if it and all its ancestors have tokens.
  bool is_used = node == 0 || token >= 0;
  uint64_t mask = bit(node) | 1;
  for (int up = parent; is_used && up > 0; up = parents[up]) {
    is_used = tokens[up] >= 0;
    mask |= bit(up);
  }
  if (!is_used) token = -1, parent = 0, mask = bit(node) | 1;
  write_node(p.trees, seq, node, token, parent, __popcll(mask) - 1, mask, slot,
             p.slots.lengths[slot]);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: the beam, seq_slots, accepted_counts, draft_lengths.
void tree_expand(const Context& ctx, const TreeExpandParams& p) {
  check_expand(p);
  if (p.beam.num_seqs == 0) return;
  launch(ctx, tree_expand_kernel, dim3(p.beam.num_seqs), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: the beam.
void draft_select(const Context& ctx, const DraftSelectParams& p) {
  check_select(p);
  if (p.beam.num_seqs == 0 || p.draft.num_tokens == 0) return;
  launch(ctx, draft_select_kernel, dim3(p.beam.num_seqs), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: the draft, seq_slots, next_tokens, lengths.
void tree_build(const Context& ctx, const TreeBuildParams& p) {
  check_build(p);
  if (p.trees.num_seqs == 0) return;
  launch(ctx, tree_build_kernel, dim3(p.trees.num_seqs), dim3(kMaxTreeSize), 0, p);
}

}  // namespace cpmcu::cuda
