// keyless_rows (kernels/tree/keyless_rows.h). One thread for each row.
//
// Roofline: latency of one launch.
//
// Surprising: each row of a tree's level is a sequence of its own. So its mask of ancestors is 0,
// and attention reads no entry of the draft.
#include "kernels/tree/keyless_rows.h"

#include "core/launch.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: CTAs of all rows.
__global__ void __launch_bounds__(kThreads)
    keyless_rows_kernel(const __grid_constant__ KeylessRowsParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.num_seqs * p.num_rows) return;
  const int seq = row / p.num_rows, slot = p.seq_slots[seq], length = p.lengths[slot];
  p.row_slots[row] = slot;
  p.positions[row] = length;
  p.token_seqs[row] = row;
  p.masks[row] = 0;
  if (row == 0) p.seq_token_begin[0] = 0;
  p.seq_token_begin[row + 1] = row + 1;
  if (row % p.num_rows != 0) return;
  p.root_ids[seq] = p.next_tokens[slot];
  p.hidden_rows[seq] = p.accepted.hidden_row(slot, length - 1);
  p.draft_lengths[slot] = length - max(p.accepted.counts[slot], 1);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: seq_slots, lengths, next_tokens, accepted.
void keyless_rows(const Context& ctx, const KeylessRowsParams& p) {
  check_keyless_rows(p);
  const int num_rows = p.num_seqs * p.num_rows;
  if (num_rows == 0) return;
  launch(ctx, keyless_rows_kernel, dim3((num_rows + kThreads - 1) / kThreads), dim3(kThreads), 0,
         p);
}

}  // namespace cpmcu::cuda
