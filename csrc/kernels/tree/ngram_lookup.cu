// ngram_lookup: prompt look-up (kernels/tree/tree.h). One CTA for each sequence.
//
// Roofline: 4 bytes a token from L2 by one SM, a few microseconds for 32K tokens.
//
// Schedule: each thread visits places of the text. At each place it counts how many tokens before
// the place equal the last tokens of the text. A reduction selects the longest match, then the
// latest.
//
// Surprising: one pass over the text serves all n-gram lengths.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "kernels/tree/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBatch = 8;  // loads of a thread that are in flight

// ---- kernels

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    ngram_lookup_kernel(const __grid_constant__ NgramLookupParams p) {
  __shared__ uint64_t scratch[32];
  __shared__ int tail[kMaxNgram];  // tail[i]: the token i places before the last
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, thread = threadIdx.x;
  const int slot = p.seq_slots[seq], length = p.lengths[slot];
  const int* history = p.history + int64_t{slot} * p.max_len;
  int* chain = p.chain + seq * p.num_tokens;
  const int size = length + 1 + p.first;
  const auto token_at = [&](int i) {
    return i < length ? history[i] : i == length ? p.next_tokens[slot] : chain[i - length - 1];
  };

  bool has_gap = false;  // an unused token lies in chain[b, 0 .. first)
  for (int i = thread; i < p.first; i += kThreads) has_gap = has_gap || chain[i] < 0;
  if (thread < min(p.max_ngram, size)) tail[thread] = token_at(size - 1 - thread);
  has_gap = __syncthreads_or(has_gap);

  // A match of n tokens before `end` has the key (n, end): n in the upper word, end in the lower.
  uint64_t best = 0;
  const int last = tail[0];
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
      if (end > size - 1 || tokens[i] != last) continue;
      int n = 1;
      while (n < min(end, p.max_ngram) && token_at(end - 1 - n) == tail[n]) ++n;
      if (n < p.min_ngram) continue;
      best = max(best, uint64_t{static_cast<uint32_t>(n)} << 32 | static_cast<uint32_t>(end));
    }
  }
  best = block_reduce<kThreads>(best, uint64_t{0}, scratch, Max{});
  const int end = static_cast<int>(best & 0xffffffffu);
  const bool found = best != 0 && !has_gap;
  for (int i = p.first + thread; i < p.num_tokens; i += kThreads) {
    chain[i] = found ? token_at(end + (i - p.first) % (size - end)) : -1;
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: seq_slots, history, lengths, next_tokens, chain.
void ngram_lookup(const Context& ctx, const NgramLookupParams& p) {
  check_ngram(p);
  if (p.num_seqs == 0) return;
  launch(ctx, ngram_lookup_kernel, dim3(p.num_seqs), dim3(kThreads), 0, p);
}

}  // namespace cpmcu::cuda
