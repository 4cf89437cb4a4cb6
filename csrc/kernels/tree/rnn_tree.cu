// rnn_tree (kernels/tree/rnn_tree.h). One CTA for each sequence.
//
// Roofline: reads of one CTA from L2. A node that is taken reads 2 r columns of W and K rows of the
// successors: 0.8 MB at r = 256.
//
// Schedule: the CTA computes the scores below a node. Then warp 0 takes nodes, best first, until it
// takes one whose scores are missing.
//
// Surprising: no scores are computed below the last node, nor below the ends of the longest paths.
#include "core/launch.h"
#include "kernels/launch_checks.h"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/candidate_scores.cuh"
#include "kernels/tree/rnn_tree.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 32;
constexpr int kRows = 4;  // rows of W that a warp multiplies at a time
// Maximum number of entries: each node adds a sibling and a child.
constexpr int kFrontier = 2 * kMaxTreeSize;

struct Node {
  int number;  // number of the node; 0: the root; -1: no node
  int parent, token;
  int depth;  // tokens of the path to the node
  float score;
};

// A candidate that may be added next, below a node.
struct Entry {
  float score;         // score of the path to the candidate
  float own;           // score of the candidate below its parent
  float parent_score;  // score of the path to the parent
  int depth, candidate, parent;
};

template <typename T>
struct Arrays {
  const T *weight, *predecessors, *successors;
  const float* inputs;
  float* states;
  int rank, columns;  // r, and the number of columns of `weight`
};

// z = W's first 2 r columns times x [2 r], plus `inputs`; z has 3 r values.
template <typename T>
__device__ void multiply(const Arrays<T>& a, const float* x, const float* inputs, float* z) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = kRows * warp; first < 3 * a.rank; first += kRows * kWarps) {
    float sums[kRows] = {};
    for (int i = 8 * lane; i < 2 * a.rank; i += 8 * 32) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const auto eight = load<T, 8>(a.weight + int64_t{first + row} * a.columns + i);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[row] += to_float(eight[e]) * x[i + e];
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float sum = warp_reduce(sums[row], Sum{});
      if (lane == 0) z[first + row] = sum + inputs[first + row];
    }
  }
}

// Computes a node's own state and the scores [K] of the candidates below it. `shared`: 6 r floats.
template <typename T>
__device__ void score_below(const RnnTreeParams& p, const Arrays<T>& a, const Node& node, int seq,
                            float* shared, float* scores) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = a.rank;
  float *const x = shared, *const z = x + 2 * rank, *const output = z + 3 * rank;
  float* const states = a.states + int64_t{seq} * kMaxTreeSize * rank;
  const int position = seq * p.block.depth + node.depth;
  for (int i = threadIdx.x; i < rank; i += 32 * kWarps) {
    x[i] = node.number == 0 ? 0.0f : states[node.parent * rank + i];
    x[rank + i] = to_float(a.predecessors[int64_t{node.token} * rank + i]);
  }
  __syncthreads();
  multiply(a, x, a.inputs + int64_t{position} * 3 * rank, z);
  __syncthreads();
  for (int i = threadIdx.x; i < rank; i += 32 * kWarps) {
    const float gate = sigmoid(z[i]);
    states[node.number * rank + i] = gate * x[i] + (1.0f - gate) * tanhf(z[rank + i]);
    output[i] = tanhf(z[2 * rank + i]);
  }
  __syncthreads();
  if (warp < p.block.topk) {
    const int candidate = p.block.ids[position * p.block.topk + warp];
    const T* const successor = a.successors + int64_t{max(candidate, 0)} * rank;
    float dot = 0;
    for (int i = 8 * lane; i < rank; i += 8 * 32) {
      const auto eight = load<T, 8>(successor + i);
#pragma unroll
      for (int e = 0; e < 8; ++e) dot += to_float(eight[e]) * output[i + e];
    }
    dot = warp_reduce(dot, Sum{});
    if (lane == 0) scores[warp] = dot;
  }
  __syncthreads();
  if (warp > 0) return;
  const CandidateLogit found =
      logit_of_lane(p.block.ids + position * p.block.topk,
                    p.block.logprobs + position * p.block.topk, p.block.topk, scores);
  scores[lane] = found.logprob();
  __syncwarp();
}

// The entries of one sequence. All functions are for a whole warp.
struct Frontier {
  Entry* entries;                 // [kFrontier] in shared memory
  uint64_t keys[kFrontier / 32];  // lane l has those of entries l, l + 32, ...; 0: none
  int num_entries;

  // Adds the best of `scores` [topk] that comes after `last`. Null: the best of all.
  __device__ void add(const float* scores, int topk, int depth, int parent, float parent_score,
                      const Entry* last) {
    const int lane = threadIdx.x;
    const float mine = lane < topk ? scores[lane] : kNone;
    const bool exists = !isnan(mine) && mine != kNone;
    const bool after =
        last == nullptr || mine < last->own || (mine == last->own && lane > last->candidate);
    const uint64_t best = warp_reduce(exists && after ? key_of(mine, lane) : uint64_t{0}, Max{});
    if (best == 0) return;
    const float own = value_of(best), score = parent_score + own;
    if (isnan(score) || score == kNone) return;
    __syncwarp();
    if (lane == 0) entries[num_entries] = {score, own, parent_score, depth, token_of(best), parent};
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) {
      if (num_entries == lane + 32 * i) keys[i] = key_of(score, num_entries);
    }
    ++num_entries;
    __syncwarp();
  }

  // The number of the best entry, which is removed. -1: none.
  __device__ int take() {
    const int lane = threadIdx.x;
    uint64_t key = 0;
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) key = max(key, keys[i]);
    key = warp_reduce(key, Max{});
    if (key == 0) return -1;
    const int at = token_of(key);
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) {
      if (at == lane + 32 * i) keys[i] = 0;
    }
    return at;
  }
};

// Grid: B.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    rnn_tree_kernel(const __grid_constant__ RnnTreeParams p, const Arrays<T> arrays) {
  extern __shared__ __align__(16) float shared[];  // [6 r]
  __shared__ float scores[kMaxTreeSize][kMaxTopk];
  __shared__ Entry entries[kFrontier];
  __shared__ Node next;
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, num_tokens = p.draft.num_tokens, begin = seq * num_tokens;
  for (int i = threadIdx.x; i < num_tokens; i += 32 * kWarps) {
    p.draft.tokens[begin + i] = -1;
    p.draft.parents[begin + i] = p.chain ? i : 0;
    p.draft.scores[begin + i] = kNone;
  }
  Frontier frontier{.entries = entries, .keys = {}, .num_entries = 0};
  int num_taken = 0;
  Node node{.number = 0,
            .parent = 0,
            .token = p.block.next_tokens[p.block.seq_slots[seq]],
            .depth = 0,
            .score = 0};
  while (node.number >= 0) {
    score_below(p, arrays, node, seq, shared, scores[node.number]);
    if (threadIdx.x < 32) {
      frontier.add(scores[node.number], p.block.topk, node.depth, node.number, node.score, nullptr);
      Node found{.number = -1};
      while (num_taken < num_tokens && found.number < 0) {
        const int at = frontier.take();
        if (at < 0) break;
        const Entry entry = entries[at];
        const int id =
            p.block.ids[(seq * p.block.depth + entry.depth) * p.block.topk + entry.candidate];
        const int token = p.block.id_map != nullptr ? p.block.id_map[id] : id;
        if (threadIdx.x == 0) {
          p.draft.tokens[begin + num_taken] = token;
          p.draft.parents[begin + num_taken] = entry.parent;
          p.draft.scores[begin + num_taken] = entry.score;
        }
        ++num_taken;
        if (!p.chain) {
          frontier.add(scores[entry.parent], p.block.topk, entry.depth, entry.parent,
                       entry.parent_score, &entry);
        }
        if (entry.depth + 1 < p.longest && num_taken < num_tokens) {
          found = {num_taken, entry.parent, token, entry.depth + 1, entry.score};
        }
      }
      if (threadIdx.x == 0) next = found;
    }
    __syncthreads();
    node = next;
    __syncthreads();
  }
}

}  // namespace

// Graph-safe; reads from the device: candidates, logprobs, seq_slots, next_tokens, the weights.
void rnn_tree(const Context& ctx, const RnnTreeParams& p) {
  check_rnn_tree(p);
  check_rows("rnn_tree", "predecessors", p.predecessors);
  check_rows("rnn_tree", "successors", p.successors);
  check_rows("rnn_tree", "weight", p.weight);
  if (p.block.num_seqs == 0 || p.draft.num_tokens == 0) return;
  const int rank = static_cast<int>(p.predecessors.size(1));
  dispatch_half(p.weight.dtype(), [&](auto t) {
    using T = decltype(t);
    const Arrays<T> arrays{.weight = p.weight.as<const T>(),
                           .predecessors = p.predecessors.as<const T>(),
                           .successors = p.successors.as<const T>(),
                           .inputs = p.inputs.as<const float>(),
                           .states = p.states.as<float>(),
                           .rank = rank,
                           .columns = static_cast<int>(p.weight.size(1))};
    launch(ctx, rnn_tree_kernel<T>, dim3(p.block.num_seqs), dim3(32 * kWarps),
           6 * sizeof(float) * rank, p, arrays);
  });
}

}  // namespace cpmcu::cuda
