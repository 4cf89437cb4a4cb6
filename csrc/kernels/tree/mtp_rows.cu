// mtp_rows and shift_ids (kernels/tree/mtp_rows.h).
//
// Roofline: latency, of up to D + 3 dependent loads.
//
// Schedule: one CTA for each sequence, one thread for each row.
//
// Surprising: a drafted path is not stored. Each row walks up the beam's candidates from its branch
// to the level of its token.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/tree/mtp_rows.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxTreeSize <= kThreads && kMaxTopk <= kThreads, "one thread for each row");

// ---- kernels

// Grid: B.
__global__ void __launch_bounds__(kThreads)
    mtp_rows_kernel(const __grid_constant__ MtpRowsParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const MtpRows& out = p.rows;
  const int seq = blockIdx.x, thread = threadIdx.x;
  const MtpSequence sequence = MtpSequence::of(p, seq);
  const int count = sequence.rows_in_launch(p.module);
  int begin = seq * count, begin_before = seq * sequence.rows_in_launch(p.module - 1);
  if (p.prompt_ids) {  // sequences have different numbers of rows
    begin = 0;
    for (int i = 0; i < seq; ++i) begin += MtpSequence::of(p, i).num_rows;
    begin_before = begin;
  }
  if (thread < count) {
    const int at = begin + thread;
    const bool pads = sequence.is_padding(thread);
    const int row = pads ? 0 : thread, position = sequence.position_of(row);
    out.ids[at] = pads ? 0 : sequence.id_at(position + p.module + 1, sequence.branch_of(row));
    out.positions[at] = pads ? sequence.length - sequence.num_rows + thread : position;
    out.token_seqs[at] = seq;
    out.hidden_rows[at] = sequence.hidden_row_of(row, begin_before);
    if (!p.prompt_ids) out.ancestor_masks[at] = sequence.mask_of(thread);
  }
  const int num_last = p.module == 0 ? 1 : p.beam.topk;
  if (thread < num_last && !p.prompt_ids) {
    out.last_rows[seq * num_last + thread] = begin + sequence.row_of(thread, sequence.length - 1);
  }
  if (thread != 0) return;
  out.lengths[sequence.slot] = sequence.length - sequence.num_rows;
  if (p.draft_lengths && p.module == 0) {
    p.draft_lengths[sequence.slot] =
        sequence.length - max(p.slots.accepted.counts[sequence.slot], 1);
  }
  if (seq == 0) out.seq_token_begin[0] = 0;
  out.seq_token_begin[seq + 1] = begin + count;
}

__global__ void __launch_bounds__(kThreads)
    shift_ids_kernel(const __grid_constant__ ShiftIdsParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int t = blockIdx.x * kThreads + threadIdx.x;
  if (t >= p.num_tokens) return;
  const int from = t + p.shift;
  p.shifted[t] = from < p.seq_token_begin[p.token_seqs[t] + 1] ? p.ids[from] : 0;
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: all but the sizes.
void mtp_rows(const Context& ctx, const MtpRowsParams& p) {
  check_mtp_rows(p);
  if (p.num_seqs == 0) return;
  launch(ctx, mtp_rows_kernel, dim3(p.num_seqs), dim3(kThreads), 0, p);
}

// Graph-safe; reads from the device: all but the sizes.
void shift_ids(const Context& ctx, const ShiftIdsParams& p) {
  if (p.num_tokens == 0) return;
  launch(ctx, shift_ids_kernel, dim3((p.num_tokens + kThreads - 1) / kThreads), dim3(kThreads), 0,
         p);
}

}  // namespace cpmcu::cuda
