// block_rows, pair_scores and lattice_tree (kernels/tree/lattice.h).
//
// Roofline: latency, a few microseconds. pair_scores reads 2 K rows of the codebooks for each
// position: 7 positions of 16 candidates read 115 KB.
//
// Schedule:
//   op            CTA                      work
//   block_rows    one for each sequence    a thread writes a row
//   pair_scores   one for each position    all rows are loaded at once into shared memory; a warp
//                                          scores four predecessors, and a lane is a successor
//   lattice_tree  a warp for each sequence a lane is a candidate; one node after another
//
// Surprising: two frontier entries for each node, its next sibling and its best child, suffice for
// the exact best tree. Scores name the next sibling: among equal ones it is the next index.
#include <cmath>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/candidate_scores.cuh"
#include "kernels/tree/lattice_checks.h"

namespace cpmcu::cuda {
namespace {

// ---- block_rows

// Grid: B. One thread for each row.
__global__ void __launch_bounds__(kMaxTreeSize)
    block_rows_kernel(const __grid_constant__ BlockRowsParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, j = threadIdx.x, slot = p.seq_slots[seq];
  if (j >= p.num_rows) return;
  const int row = seq * p.num_rows + j;
  p.ids[row] = j == 0 ? p.next_tokens[slot] : p.mask_id;
  p.positions[row] = p.lengths[slot] + j;
  p.token_seqs[row] = seq;
  p.all_masks[row] = ~uint64_t{0} >> (kMaxTreeSize - p.num_rows);
  if (j > 0) p.mask_rows[row - seq - 1] = row;
  if (row == 0) p.seq_token_begin[0] = 0;
  if (j == 0) p.seq_token_begin[seq + 1] = row + p.num_rows;
}

// ---- pair_scores

constexpr int kPairWarps = 8;
// Rows that a warp loads, and also predecessors that it scores.
constexpr int kHeld = kMaxTopk / kPairWarps;
constexpr int kVecs = 32;  // vectors of 8 elements in the part of a row that is staged

// The target's id of a candidate; -1: none.
__device__ __forceinline__ int target_id(const PairScoresParams& p, int candidate) {
  return candidate >= 0 && p.block.id_map != nullptr ? p.block.id_map[candidate] : candidate;
}

// Grid: (D, B).
template <typename T>
__global__ void __launch_bounds__(32 * kPairWarps)
    pair_scores_kernel(const __grid_constant__ PairScoresParams p, const T* predecessors,
                       const T* successors, const T* gates, const T* predecessor_gates, int rank) {
  __shared__ __align__(16) float left[kMaxTopk][8 * kVecs];  // gated predecessors
  __shared__ Vec16<T> right[kMaxTopk][kVecs];  // vector v of row b is at v ^ b % 8: no conflicts
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int depth = blockIdx.x, seq = blockIdx.y, k = p.block.topk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int position = seq * p.block.depth + depth, num_parents = depth == 0 ? 1 : k;
  const int* const candidates = p.block.ids + position * k;

  // Loads beyond the last row read the last row, and missing candidates read row 0. So no load
  // waits for a branch.
  int parents[kHeld], children[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int row = warp + i * kPairWarps;
    children[i] = candidates[min(row, k - 1)];
    parents[i] = depth == 0 ? p.block.next_tokens[p.block.seq_slots[seq]]
                            : target_id(p, candidates[min(row, k - 1) - k]);
  }
  float dots[kHeld] = {};  // dots of successor `lane` with predecessors warp + i kPairWarps
  for (int first = 0; first < rank; first += 8 * kVecs) {
    const int num_vecs = min(kVecs, (rank - first) / 8);
    const int element = first + 8 * min(lane, num_vecs - 1);
    Vec16<T> gate, lefts[kHeld], rights[kHeld], left_gates[kHeld];
    if (gates != nullptr) gate = load<T, 8>(gates + int64_t{position} * rank + element);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      lefts[i] = load<T, 8>(predecessors + int64_t{max(parents[i], 0)} * rank + element);
      rights[i] = load<T, 8>(successors + int64_t{max(children[i], 0)} * rank + element);
      if (predecessor_gates != nullptr) {
        left_gates[i] =
            load<T, 8>(predecessor_gates + int64_t{max(parents[i], 0)} * rank + element);
      }
    }
    __syncthreads();  // the part before is no longer read
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = warp + i * kPairWarps;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float value = to_float(lefts[i][e]);
        float factor = gates == nullptr ? 1.0f : to_float(gate[e]);
        if (predecessor_gates != nullptr) {
          factor = sigmoid(factor + to_float(left_gates[i][e]));
        }
        left[row][8 * lane + e] = value * factor;
      }
      right[row][lane ^ row % 8] = rights[i];
    }
    __syncthreads();
    for (int v = 0; v < num_vecs; ++v) {
      const Vec16<T> row = right[lane][v ^ lane % 8];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int a = warp + i * kPairWarps;
        if (a >= num_parents) break;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto four = load<float, 4>(&left[a][8 * v + 4 * part]);
#pragma unroll
          for (int e = 0; e < 4; ++e) dots[i] += four[e] * to_float(row[4 * part + e]);
        }
      }
    }
  }

  const bool exists = lane < k && candidates[lane] >= 0;
  float logprob = exists ? p.block.logprobs[position * k + lane] : kNone;
  if (isnan(logprob)) logprob = kNone;
  const float mass = warp_reduce(expf(logprob), Sum{});
  const float rest = p.keeps_rest ? fmaxf(1.0f - mass, 0.0f) : 0.0f;
  const float more = p.keeps_rest ? 0.0f : logf(mass);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int a = warp + i * kPairWarps;
    if (a >= num_parents) break;
    float score = logprob == kNone || parents[i] < 0 ? kNone : logprob + dots[i];
    if (isnan(score)) score = kNone;
    const float largest = fmaxf(warp_reduce(score, Max{}), rest > 0 ? logf(rest) : kNone);
    const float sum = warp_reduce(score == kNone ? 0.0f : expf(score - largest), Sum{}) +
                      (rest > 0 ? rest * expf(-largest) : 0.0f);
    if (lane < k) {
      p.pairs[(int64_t{position} * k + a) * k + lane] =
          score == kNone ? kNone : score - largest - logf(sum) + more;
    }
  }
  if (warp == 0 && lane < k) p.tokens[position * k + lane] = target_id(p, candidates[lane]);
}

// ---- lattice_tree

// Maximum number of entries: each node adds a sibling and a child.
constexpr int kFrontier = 2 * kMaxTreeSize;

// A node that may be added next.
struct Entry {
  float score;         // score of the path to the candidate
  float own;           // score of the candidate below its parent
  float parent_score;  // score of the path to the parent
  int depth, candidate, parent_candidate;
  int parent;     // number of the parent's node
  bool on_path;   // the parent is on the greedy path
  bool is_first;  // the candidate is the best below its parent
};

// The best candidate at `depth` below `parent` of those that come after `last`; null: the best of
// all. Returns -1 if there is none. `own` gets its score. All lanes get the result.
__device__ int best_below(const Lattice& lattice, int seq, int depth, int parent, const Entry* last,
                          float& own) {
  const int lane = threadIdx.x, k = lattice.topk;
  const int64_t position = int64_t{seq} * lattice.depth + depth;
  float score = kNone;
  if (lane < k) {
    score = lattice.scores != nullptr ? lattice.scores[position * k + lane]
                                      : lattice.pairs[(position * k + parent) * k + lane];
  }
  const bool exists = !isnan(score) && score != kNone;
  const bool after =
      last == nullptr || score < last->own || (score == last->own && lane > last->candidate);
  const uint64_t best = warp_reduce(exists && after ? key_of(score, lane) : uint64_t{0}, Max{});
  if (best == 0) return -1;
  own = value_of(best);
  return token_of(best);
}

// Grid: B.
__global__ void __launch_bounds__(32)
    lattice_tree_kernel(const __grid_constant__ LatticeTreeParams p) {
  __shared__ Entry entries[kFrontier];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const Lattice& lattice = p.lattice;
  const int seq = blockIdx.x, lane = threadIdx.x, num_tokens = p.draft.num_tokens;
  const int begin = seq * num_tokens;
  const int* const tokens = lattice.tokens + int64_t{seq} * lattice.depth * lattice.topk;
  for (int i = lane; i < num_tokens; i += 32) {
    p.draft.tokens[begin + i] = -1;
    p.draft.parents[begin + i] = p.chain ? i : 0;
    p.draft.scores[begin + i] = kNone;
  }
  __syncwarp();
  if (p.chain) {
    float own = 0, score = 0;
    for (int d = 0, parent = 0; d < min(p.depth, num_tokens); ++d) {
      parent = best_below(lattice, seq, d, parent, nullptr, own);
      if (parent < 0) return;
      score += own;
      if (lane == 0) {
        p.draft.tokens[begin + d] = tokens[d * lattice.topk + parent];
        p.draft.scores[begin + d] = score;
      }
    }
    return;
  }

  uint64_t keys[kFrontier / 32] = {};  // lane l has those of entries l, l + 32, ...; 0: none
  int num_entries = 0;
  // Adds the best candidate after `last` below a parent.
  const auto add = [&](int depth, int parent_candidate, int parent, float parent_score,
                       bool on_path, const Entry* last) {
    if (depth >= p.depth) return;
    float own = 0;
    const int candidate = best_below(lattice, seq, depth, parent_candidate, last, own);
    if (candidate < 0) return;
    const float score = parent_score + own + (on_path ? 0.0f : p.off_path);
    if (isnan(score) || score == kNone) return;
    __syncwarp();
    if (lane == 0) {
      entries[num_entries] = {score,  own,     parent_score,   depth, candidate, parent_candidate,
                              parent, on_path, last == nullptr};
    }
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) {
      if (num_entries == lane + 32 * i) keys[i] = key_of(score, num_entries);
    }
    ++num_entries;
    __syncwarp();
  };
  add(0, 0, 0, 0, true, nullptr);
  for (int node = 0; node < num_tokens; ++node) {
    uint64_t key = 0;
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) key = max(key, keys[i]);
    key = warp_reduce(key, Max{});
    if (key == 0) return;
    const int at = token_of(key);
#pragma unroll
    for (int i = 0; i < kFrontier / 32; ++i) {
      if (at == lane + 32 * i) keys[i] = 0;
    }
    const Entry entry = entries[at];
    if (lane == 0) {
      p.draft.tokens[begin + node] = tokens[entry.depth * lattice.topk + entry.candidate];
      p.draft.parents[begin + node] = entry.parent;
      p.draft.scores[begin + node] = entry.score;
    }
    add(entry.depth, entry.parent_candidate, entry.parent, entry.parent_score, entry.on_path,
        &entry);
    add(entry.depth + 1, entry.candidate, node + 1, entry.score, entry.on_path && entry.is_first,
        nullptr);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: seq_slots, lengths, next_tokens.
void block_rows(const Context& ctx, const BlockRowsParams& p) {
  check_block_rows(p);
  if (p.num_seqs == 0) return;
  launch(ctx, block_rows_kernel, dim3(p.num_seqs), dim3(kMaxTreeSize), 0, p);
}

// Graph-safe; reads from the device: candidates, logprobs, seq_slots, next_tokens, the codebooks.
void pair_scores(const Context& ctx, const PairScoresParams& p) {
  check_pair_scores(p);
  check_rows("pair_scores", "predecessors", p.predecessors);
  check_rows("pair_scores", "successors", p.successors);
  if (!p.gates.empty()) check_rows("pair_scores", "gates", p.gates);
  if (!p.predecessor_gates.empty()) {
    check_rows("pair_scores", "predecessor_gates", p.predecessor_gates);
  }
  if (p.block.num_seqs == 0) return;
  const int rank = static_cast<int>(p.predecessors.size(1));
  dispatch_half(p.predecessors.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, pair_scores_kernel<T>, dim3(p.block.depth, p.block.num_seqs), dim3(32 * kPairWarps),
           0, p, p.predecessors.as<const T>(), p.successors.as<const T>(),
           p.gates.empty() ? nullptr : p.gates.as<const T>(),
           p.predecessor_gates.empty() ? nullptr : p.predecessor_gates.as<const T>(), rank);
  });
}

// Graph-safe; reads from the device: the lattice.
void lattice_tree(const Context& ctx, const LatticeTreeParams& p) {
  check_lattice_tree(p);
  if (p.lattice.num_seqs == 0 || p.draft.num_tokens == 0) return;
  launch(ctx, lattice_tree_kernel, dim3(p.lattice.num_seqs), dim3(32), 0, p);
}

}  // namespace cpmcu::cuda
