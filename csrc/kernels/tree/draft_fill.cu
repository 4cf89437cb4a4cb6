// draft_fill and fill_observe (kernels/tree/draft_fill.h). One CTA for each sequence; one in all.
//
// Roofline: 4 bytes a token of the text from L2 by one SM, a few microseconds for 32K tokens.
//
// Schedule of draft_fill:
//   1. One warp finds the main path. It asks all nodes at once, by votes.
//   2. Each thread visits places of the text and compares them with the end of each T_j. A
//      reduction selects the longest match.
//   3. One warp walks down the draft along the context's path and appends what is missing.
//   4. Each node counts the nodes with better scores: its rank is its place in the filled draft.
//
// Surprising: one array has the last tokens of all T_j, because each T_j begins further left in it.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "kernels/tree/draft_fill.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBatch = 8;  // loads of a thread that are in flight
constexpr int kNodes = kMaxTreeSize + kMaxDraftDepth;
constexpr int kTail = kMaxNgram + kMaxDraftDepth;
constexpr int kObserveThreads = 128;

struct Shared {
  // Node 0 is the root, 1 .. 63 are the draft, 64 .. are appended. An unused node has token -1.
  int tokens[kNodes], parents[kNodes], ranks[kNodes];
  float scores[kNodes];
  int main_path[kMaxDraftDepth];  // nodes of the main path, the root first
  int num_main;                   // tokens of the main path
  int tail[kTail];                // tail[i]: the token i places before the end of the longest T_j
  int path[kMaxDraftDepth];       // tokens of the context's path
  float log_rates[kMaxDraftDepth];
  uint64_t scratch[32];
};

// ---- kernels

__device__ float rate(const FillRates& rates, int n) {
  const int at = min(n, kMaxNgram);
  const float guess = kFillPrior * static_cast<float>(at) / static_cast<float>(at + 1);
  return (rates.hits[at] + guess) / (rates.trials[at] + kFillPrior);
}

// Root and draft. A token is used if it and all its ancestors are at least 0.
__device__ void load_nodes(const DraftFillParams& p, Shared& s, int seq, int root) {
  const int node = threadIdx.x;
  const bool is_drafted = node > 0 && node <= p.draft.num_tokens;
  const int at = seq * p.draft.num_tokens + node - 1;
  if (node < kNodes) {
    s.tokens[node] = node == 0 ? root : is_drafted ? p.draft.tokens[at] : -1;
    s.parents[node] = is_drafted ? (p.draft.parents ? p.draft.parents[at] : node - 1) : 0;
    float score = 0;
    if (is_drafted) {
      score = p.draft.scores ? p.draft.scores[at] : kUnknownLogprob * static_cast<float>(node);
    }
    s.scores[node] = isnan(score) ? -INFINITY : score;
  }
  __syncthreads();
  bool is_used = true;
  if (is_drafted) {
    for (int up = node; is_used && up > 0; up = s.parents[up]) is_used = s.tokens[up] >= 0;
  }
  __syncthreads();
  if (!is_used) s.tokens[node] = -1;
  __syncthreads();
}

// The first child of `parent` in the draft, with `token` unless it is -1. 0: there is none. For a
// whole warp.
__device__ int child_of(const Shared& s, int parent, int token) {
#pragma unroll
  for (int base = 0; base < kMaxTreeSize; base += 32) {
    const int node = base + threadIdx.x % 32, found = s.tokens[node];
    const bool fits =
        node > 0 && found >= 0 && s.parents[node] == parent && (token < 0 || found == token);
    const uint32_t votes = __ballot_sync(0xffffffffu, fits);
    if (votes != 0) return base + __ffs(static_cast<int>(votes)) - 1;
  }
  return 0;
}

// Follows the context's path and appends the tokens that the draft lacks. For one warp.
__device__ void join_path(const DraftFillParams& p, Shared& s, int first) {
  int node = s.main_path[first], next = kMaxTreeSize;
  for (int i = first; i < p.max_depth; ++i) {
    const float score = s.scores[node] + s.log_rates[i - first];
    const int token = s.path[i];
    int child = node < kMaxTreeSize ? child_of(s, node, token) : 0;
    const bool is_new = child == 0;
    if (is_new) child = next++;
    __syncwarp();
    if (threadIdx.x == 0) {
      s.scores[child] = is_new ? score : fmaxf(s.scores[child], score);
      if (is_new) s.tokens[child] = token, s.parents[child] = node;
    }
    __syncwarp();
    node = child;
  }
}

// Writes the best nodes in the order of their scores.
__device__ void write_best(const DraftFillParams& p, Shared& s, int seq) {
  const int node = threadIdx.x, num_tokens = p.filled.num_tokens;
  const bool is_used = node > 0 && node < kNodes && s.tokens[node] >= 0;
  int rank = kNodes;
  if (is_used) {
    const float score = s.scores[node];
    rank = 0;
    for (int i = 1; i < kNodes; ++i) {
      const bool better = s.scores[i] > score || (s.scores[i] == score && i < node);
      rank += s.tokens[i] >= 0 && better ? 1 : 0;
    }
  }
  if (node < kNodes) s.ranks[node] = rank;
  const int num_used = __syncthreads_count(is_used);
  if (is_used && rank < num_tokens) {
    const int parent = s.parents[node], at = seq * num_tokens + rank;
    const int above = parent == 0 ? 0 : s.ranks[parent] + 1;
    const bool fits = above <= rank;  // true unless a score is invalid
    p.filled.tokens[at] = fits ? s.tokens[node] : -1;
    p.filled.parents[at] = fits ? above : 0;
    p.filled.scores[at] = fits ? s.scores[node] : -INFINITY;
  }
  if (node >= num_used && node < num_tokens) {
    const int at = seq * num_tokens + node;
    p.filled.tokens[at] = -1;
    p.filled.parents[at] = 0;
    p.filled.scores[at] = -INFINITY;
  }
}

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    draft_fill_kernel(const __grid_constant__ DraftFillParams p) {
  __shared__ Shared s;
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, thread = threadIdx.x;
  const int slot = p.seq_slots[seq], length = p.slots.lengths[slot];
  const int* history = p.slots.history + int64_t{slot} * p.slots.max_len;
  load_nodes(p, s, seq, p.slots.next_tokens[slot]);
  const auto token_at = [&](int i) {
    return i < length ? history[i] : s.tokens[i == length ? 0 : s.main_path[i - length]];
  };

  if (thread < 32) {
    int node = 0, count = 0;
    if (thread == 0) s.main_path[0] = 0;
    while (count < p.max_depth - 1) {
      node = child_of(s, node, -1);
      if (node == 0) break;
      ++count;
      if (thread == 0) s.main_path[count] = node;
    }
    if (thread == 0) s.num_main = count;
  }
  __syncthreads();
  const int num_main = s.num_main, size = length + 1 + num_main;
  if (thread < min(p.max_ngram + num_main, size)) s.tail[thread] = token_at(size - 1 - thread);
  __syncthreads();

  // A match of n tokens before `end` of T_j has the key (n, -j, end). T_j has length + 1 + j
  // tokens.
  uint64_t best = 0;
  for (int first = thread; first < size - 1; first += kBatch * kThreads) {
    int tokens[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * kThreads;
      tokens[i] = at < size - 1 ? token_at(at) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int end = first + i * kThreads + 1;
      if (end > size - 1) continue;
      for (int j = max(0, end - length); j <= num_main; ++j) {
        const int* tail = s.tail + num_main - j;
        if (tokens[i] != tail[0]) continue;
        int n = 1;
        while (n < min(end, p.max_ngram) && token_at(end - 1 - n) == tail[n]) ++n;
        if (n < p.min_ngram) continue;
        const uint64_t key = uint64_t{static_cast<uint32_t>(n)} << 40 |
                             uint64_t{static_cast<uint32_t>(kMaxDraftDepth - j)} << 32 |
                             static_cast<uint32_t>(end);
        best = max(best, key);
      }
    }
  }
  best = block_reduce<kThreads>(best, uint64_t{0}, s.scratch, Max{});
  const bool found = best != 0;
  const int end = static_cast<int>(best & 0xffffffffu);
  const int j = found ? kMaxDraftDepth - static_cast<int>(best >> 32 & 0xffu) : 0;
  const int match = found ? static_cast<int>(best >> 40) : p.min_ngram - 1;

  if (thread < kMaxDraftDepth) {
    int token = 0;
    if (found && thread < p.max_depth) {
      const int at = thread < j ? length + 1 + thread : end + (thread - j) % (length + 1 + j - end);
      token = token_at(at);
      s.log_rates[thread] = logf(rate(p.rates, match + thread));
    }
    s.path[thread] = token;
    p.paths[slot].tokens[thread] = token;
  }
  if (thread == 0) {
    p.paths[slot].length = length;
    p.paths[slot].first = j;
    p.paths[slot].match = match;
    p.paths[slot].num_tokens = found ? p.max_depth : 0;
  }
  __syncthreads();
  if (found && thread < 32) join_path(p, s, j);
  __syncthreads();
  write_best(p, s, seq);
}

// Grid: 1.
__global__ void __launch_bounds__(kObserveThreads)
    fill_observe_kernel(const __grid_constant__ FillObserveParams p) {
  __shared__ int hits[kMaxNgram + 1], trials[kMaxNgram + 1];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int thread = threadIdx.x;
  if (thread <= kMaxNgram) hits[thread] = trials[thread] = 0;
  __syncthreads();
  const Accepted& accepted = p.slots.accepted;
  for (int seq = thread; seq < p.num_seqs; seq += kObserveThreads) {
    const int slot = p.seq_slots[seq], count = accepted.counts[slot];
    const FillPath& path = p.paths[slot];
    const int64_t row = int64_t{slot} * accepted.max_path;
    if (accepted.paths[row] != 0 || path.length + count != p.slots.lengths[slot]) continue;
    for (int i = 0; i < min(count, path.num_tokens); ++i) {
      const bool hit = path.tokens[i] == accepted.ids[row + i];
      if (i >= path.first) {
        const int n = min(path.match + i - path.first, kMaxNgram);
        atomicAdd(&trials[n], 1);  // integers: the order of additions does not matter
        if (hit) atomicAdd(&hits[n], 1);
      }
      if (!hit) break;
    }
  }
  __syncthreads();
  if (thread > kMaxNgram) return;
  const float total = p.rates.trials[thread] + static_cast<float>(trials[thread]);
  const float right = p.rates.hits[thread] + static_cast<float>(hits[thread]);
  const float scale = total >= kFillTrials ? 0.5f : 1.0f;
  p.rates.trials[thread] = total * scale;
  p.rates.hits[thread] = right * scale;
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: seq_slots, the slots' state, the draft, the rates.
void draft_fill(const Context& ctx, const DraftFillParams& p) {
  check_fill(p);
  if (p.num_seqs == 0) return;
  launch(ctx, draft_fill_kernel, dim3(p.num_seqs), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: seq_slots, the slots' state, the paths, the rates.
void fill_observe(const Context& ctx, const FillObserveParams& p) {
  if (p.num_seqs == 0) return;
  launch(ctx, fill_observe_kernel, dim3(1), dim3(kObserveThreads), 0, p);
}

}  // namespace cpmcu::cuda
