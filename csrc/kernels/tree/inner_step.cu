// begin_inner and extend_chain (kernels/tree/inner_step.h).
//
// Roofline: latency.
//
// Surprising: the number of drafted tokens is not stored. It is the chain's length minus
// SlotStop::max_tokens, the number of tokens that may still be drafted.
#include "kernels/tree/inner_step.h"

#include "core/launch.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

// ---- kernels

// One thread for each row of the launch that processed the accepted tokens.
__global__ void __launch_bounds__(kThreads)
    begin_inner_kernel(const __grid_constant__ BeginInnerParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x, max_path = p.accepted.max_path;
  if (row >= p.num_seqs * max_path) return;
  const int seq = row / max_path, j = row % max_path;
  const int slot = p.seq_slots[seq], length = p.lengths[slot], first = p.first_tokens[seq];
  const int count = p.accepted.counts[slot], n = max(count, 1), at = slot * max_path + j;
  const Accepted& inner = p.inner.accepted;
  p.rows[row] = j < n ? row : -1;
  p.slot_rows[row] = j < n ? inner.hidden_row(slot, length - n + 1 + j) : -1;
  inner.paths[at] = -1;
  inner.ids[at] = j < count ? p.accepted.ids[at] : j == n ? first : 0;
  if (j < p.num_tokens) p.chain[seq * p.num_tokens + j] = j == 0 ? first : -1;
  if (j > 0) return;
  p.counts[seq] = {};
  inner.counts[slot] = n + 1;
  p.inner.lengths[slot] = length + 1;
  p.inner.next_tokens[slot] = first;
  SlotStop& stop = p.stops[slot];
  stop.num_stop_ids = 0;
  stop.max_tokens = p.num_tokens - 1;
  stop.finished = p.num_tokens == 1 ? 1 : 0;
}

// One thread for each token that a step can accept.
__global__ void __launch_bounds__(kThreads)
    extend_chain_kernel(const __grid_constant__ ExtendChainParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x, max_path = p.accepted.max_path;
  if (row >= p.num_seqs * max_path) return;
  const int seq = row / max_path, j = row % max_path, slot = p.seq_slots[seq];
  const int count = p.accepted.counts[slot];
  if (j >= count) return;
  if (j == 0) p.counts[seq] = {p.counts[seq].steps + 1, p.counts[seq].tokens + count};
  const int first = p.num_tokens - p.stops[slot].max_tokens - count;
  p.chain[seq * p.num_tokens + first + j] = p.accepted.ids[slot * max_path + j];
}

dim3 ctas_for(int count) { return dim3((count + kThreads - 1) / kThreads); }

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: all but the sizes.
void begin_inner(const Context& ctx, const BeginInnerParams& p) {
  check_begin_inner(p);
  if (p.num_seqs == 0) return;
  launch(ctx, begin_inner_kernel, ctas_for(p.num_seqs * p.accepted.max_path), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: seq_slots, accepted, stops.
void extend_chain(const Context& ctx, const ExtendChainParams& p) {
  if (p.num_seqs == 0) return;
  launch(ctx, extend_chain_kernel, ctas_for(p.num_seqs * p.accepted.max_path), dim3(kThreads), 0,
         p);
}

}  // namespace cpmcu::cuda
