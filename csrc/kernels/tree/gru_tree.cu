// node_scores, node_rows and node_draft (kernels/tree/gru_tree.h).
//
// Roofline: latency, a few microseconds. node_scores reads K rows of the successors for each row.
//
// Schedule:
//   op           CTA                   work
//   node_scores  one for each row      a warp scores a candidate; warp 0 divides by the sum
//   node_rows    one for each sequence a thread counts the better nodes of one node
//   node_draft   one for each sequence likewise
#include "core/launch.h"
#include "kernels/launch_checks.h"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/candidate_scores.cuh"
#include "kernels/tree/gru_tree.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 32;      // warps of a CTA of node_scores: at least the number of candidates
constexpr int kThreads = 1024;  // threads of a CTA of the other kernels
constexpr int kMaxRows = kMaxTreeSize - 1;
constexpr int kMaxKept = kMaxDraftDepth * kMaxRows;  // maximum number of rows of all levels
constexpr int kMaxNodes = (kMaxDraftDepth - 1) * kMaxRows + kMaxRows * kMaxTopk;
static_assert(kWarps >= kMaxTopk);

// Larger scores have larger keys, then lower indices; 0: no node.
__device__ __forceinline__ uint64_t node_key(float score, int index) {
  return score == kNone || isnan(score) ? 0 : key_of(score, index);
}
// The keys among keys[begin, end) that are larger than `key`.
__device__ __forceinline__ int num_better(const uint64_t* keys, int begin, int end, uint64_t key) {
  int count = 0;
  for (int i = begin; i < end; ++i) count += keys[i] > key ? 1 : 0;
  return count;
}

// Grid: (rows, B). `width`: P.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    node_scores_kernel(const __grid_constant__ NodeScoresParams p, const float* fixed,
                       const float* moving, const T* successors, int width) {
  __shared__ float dots[kWarps];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x, seq = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t position = int64_t{seq} * p.depth + p.level;
  const int64_t own = int64_t{seq} * p.rows.num_rows + row;
  const int* const candidates = p.candidates + position * p.topk;
  if (p.level == 0 && threadIdx.x == 0) p.roots[seq] = p.next_tokens[p.seq_slots[seq]];
  if (moving != nullptr && warp < p.topk) {
    const T* const successor = successors + int64_t{max(candidates[warp], 0)} * width;
    const float dot =
        correction_of(successor, fixed + position * width, moving + own * width, width);
    if (lane == 0) dots[warp] = dot;
  }
  __syncthreads();
  if (warp > 0) return;

  const CandidateLogit found = logit_of_lane(candidates, p.logprobs + position * p.topk, p.topk,
                                             moving == nullptr ? nullptr : dots);
  if (lane >= p.topk) return;
  const float above = p.level == 0 ? 0.0f : p.rows.scores[p.rows.at(p.level - 1, seq, row)];
  const float score = found.logprob() + above;
  p.scores[own * p.topk + lane] = isnan(score) ? kNone : score;
}

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    node_rows_kernel(const __grid_constant__ NodeRowsParams p) {
  __shared__ uint64_t keys[kMaxNodes];  // rows of the levels before, then new nodes
  ptx::pdl_launch();
  ptx::pdl_wait();
  const NodeRows& rows = p.rows;
  const int seq = blockIdx.x, count = rows.num_rows, num_kept = p.level * count;
  const int num_nodes = num_kept + (p.level == 0 ? 1 : count) * p.topk;
  const float* const scores = p.scores + int64_t{seq} * count * p.topk;
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) {
    const float score =
        i < num_kept ? rows.scores[rows.at(i / count, seq, i % count)] : scores[i - num_kept];
    keys[i] = node_key(score, i);
  }
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int64_t to = rows.at(p.level, seq, i);
    rows.tokens[to] = -1;
    rows.parents[to] = 0;
    rows.scores[to] = kNone;
    p.state_rows[seq * count + i] = p.level == 0 ? seq : seq * count;
  }
  __syncthreads();
  for (int i = num_kept + threadIdx.x; i < num_nodes; i += kThreads) {
    if (keys[i] == 0) continue;
    const int before = num_better(keys, num_kept, num_nodes, keys[i]);
    if (before >= count || before + num_better(keys, 0, num_kept, keys[i]) >= count) continue;
    const int parent = (i - num_kept) / p.topk, candidate = (i - num_kept) % p.topk;
    const int64_t to = rows.at(p.level, seq, before);
    rows.tokens[to] = p.candidates[(int64_t{seq} * p.depth + p.level) * p.topk + candidate];
    rows.parents[to] = parent;
    rows.scores[to] = scores[i - num_kept];
    if (p.level > 0) p.state_rows[seq * count + before] = seq * count + parent;
  }
}

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    node_draft_kernel(const __grid_constant__ NodeDraftParams p) {
  __shared__ uint64_t keys[kMaxKept];
  __shared__ int ranks[kMaxKept];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const NodeRows& rows = p.rows;
  const int seq = blockIdx.x, count = rows.num_rows, num_nodes = p.depth * count;
  const int64_t first = int64_t{seq} * count;
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) {
    keys[i] = node_key(rows.scores[rows.at(i / count, seq, i % count)], i);
  }
  for (int i = threadIdx.x; i < count; i += kThreads) {
    p.draft.tokens[first + i] = -1;
    p.draft.parents[first + i] = 0;
    p.draft.scores[first + i] = kNone;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) {
    ranks[i] = keys[i] == 0 ? count : num_better(keys, 0, num_nodes, keys[i]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) {
    if (ranks[i] >= count) continue;
    const int64_t from = rows.at(i / count, seq, i % count), to = first + ranks[i];
    p.draft.tokens[to] = rows.tokens[from];
    p.draft.scores[to] = rows.scores[from];
    if (i >= count) p.draft.parents[to] = ranks[(i / count - 1) * count + rows.parents[from]] + 1;
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: rows, candidates, logprobs, seq_slots, next_tokens, its
// tensors.
void node_scores(const Context& ctx, const NodeScoresParams& p) {
  check_node_scores(p);
  check_rows("node_scores", "successors", p.successors);
  if (p.rows.num_seqs == 0) return;
  const dim3 grid(p.level == 0 ? 1 : p.rows.num_rows, p.rows.num_seqs);
  dispatch_half(p.successors.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, node_scores_kernel<T>, grid, dim3(32 * kWarps), 0, p,
           p.level == 0 ? nullptr : p.fixed.as<const float>(),
           p.level == 0 ? nullptr : p.moving.as<const float>(), p.successors.as<const T>(),
           static_cast<int>(p.successors.size(1)));
  });
}

// Graph-safe; reads from the device: rows, candidates, scores.
void node_rows(const Context& ctx, const NodeRowsParams& p) {
  check_node_rows("node_rows", p.rows, p.depth, p.topk, p.level);
  if (p.rows.num_seqs == 0) return;
  launch(ctx, node_rows_kernel, dim3(p.rows.num_seqs), dim3(kThreads), 0, p);
}

// Graph-safe; reads the rows from the device.
void node_draft(const Context& ctx, const NodeDraftParams& p) {
  check_node_draft(p);
  if (p.rows.num_seqs == 0) return;
  launch(ctx, node_draft_kernel, dim3(p.rows.num_seqs), dim3(kThreads), 0, p);
}

}  // namespace cpmcu::cuda
