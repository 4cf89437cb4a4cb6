// What becomes of sums: scale, residual, norm, SiLU or rotary.
#pragma once

#include <type_traits>

#include "kernels/gemm/chain/args.cuh"
#include "kernels/rotary.cuh"
#include "kernels/silu.cuh"

namespace cpmcu::cuda::chain {

// One output, after alpha, beta and the norm that x was owed. Returns what is stored.
template <typename T>
__device__ __forceinline__ T finished(const Link& link, float scale, float sum, T old) {
  const float value = __fmul_rn(scale, sum);
  return from_float<T>(link.beta == 0 ? value : __fmaf_rn(link.beta, to_float(old), value));
}
// Not infinite: before it is divided by the root of the mean square it may be large.
template <typename T>
__device__ __forceinline__ T bounded(float v) {
  constexpr float kMax = std::is_same_v<T, __half> ? 65504.0f : 3.38e38f;
  return from_float<T>(v > kMax ? kMax : v < -kMax ? -kMax : v);
}
__device__ __forceinline__ float silu_product(float gate, float up) { return silu(gate) * up; }

// What rotary_kv needs to know of row 0 and of elements `dim`, dim + 8 of a head and those half a
// head behind them.
struct Turn {
  Rotation rotations[2];
  int cell;  // [pages, 64]

  // What it reads was complete before the pass.
  __device__ __forceinline__ void load(const Rotary& rotary, int dim, bool is_value) {
    const StepRows& rows = rotary.rows;
    const int seq = rows.row_seqs[0], slot = rows.seq_slots[seq];
    const int in_slot = rows.slot_lengths[slot] + rows.first_row - rows.seq_row_begin[seq];
    const int64_t page = int64_t{slot} * rows.max_pages + in_slot / kPageSize;
    cell = rows.page_table[page] * kPageSize + in_slot % kPageSize;
    if (is_value) return;
    const float position = static_cast<float>(rows.positions[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rotations[half] =
          rotation_by(position * rotary.inv_freq[dim + half * 8], rotary.attention_scaling);
    }
  }
};

}  // namespace cpmcu::cuda::chain
