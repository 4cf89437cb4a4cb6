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
  const int seq = blockIdx.x, thread = threadIdx.x;
  const MtpSequence sequence = MtpSequence::of(p, seq);
  const int count = sequence.rows_in_launch(p.module);
  int begin = seq * count, begin_before = seq * sequence.rows_in_launch(p.module - 1);
  if (p.prompt_ids) {  // sequences have different numbers of rows
    begin = 0;
    for (int i = 0; i < seq; ++i) begin += MtpSequence::of(p, i).num_rows;
    begin_before = begin;
  }
  if (thread < count) sequence.write_row(thread, begin, begin_before);
  if (thread < sequence.num_last()) sequence.write_last_row(thread, begin);
  if (thread != 0) return;
  sequence.write_lengths();
  if (seq == 0) p.rows.seq_token_begin[0] = 0;
  p.rows.seq_token_begin[seq + 1] = begin + count;
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
