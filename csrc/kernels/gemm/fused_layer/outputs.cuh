// Epilogue of one element: scale, residual, norm, SiLU or RoPE.
#pragma once

#include <type_traits>

#include "kernels/gemm/fused_layer/args.cuh"
#include "kernels/layer/rotary.cuh"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda::fused {

// Applies alpha, beta and the norm of x. Returns the value to store.
template <typename T>
__device__ __forceinline__ T finished(const GemmArgs& gemm, float scale, float sum, T old) {
  const float value = __fmul_rn(scale, sum);
  return from_float<T>(gemm.beta == 0 ? value : __fmaf_rn(gemm.beta, to_float(old), value));
}
// With a bias; rounded once.
template <typename T>
__device__ __forceinline__ T biased(const GemmArgs& gemm, float scale, float sum, T old, T bias) {
  const float value = __fmul_rn(scale, sum);
  return from_float<T>(__fmaf_rn(gemm.beta, gemm.beta == 0 ? 0.0f : to_float(old), value) +
                       to_float(bias));
}
// Clamps to the largest finite value: y * norm_weight is stored before the division by the root
// mean square, so it may be large.
template <typename T>
__device__ __forceinline__ T bounded(float v) {
  constexpr float kMax = std::is_same_v<T, __half> ? 65504.0f : 3.38e38f;
  return from_float<T>(v > kMax ? kMax : v < -kMax ? -kMax : v);
}
__device__ __forceinline__ float silu_product(float gate, float up) { return silu(gate) * up; }

// Angles and KV entry of one token, for elements `dim`, dim + 8 and their partners half a head
// further.
struct TokenRotation {
  Rotation rotations[2];
  int entry;  // index of the KV entry in [pages, 64]

  // Reads only data that were complete before the pass.
  __device__ __forceinline__ void load(const Rotary& rotary, int row, int dim, bool is_value) {
    const StepTokens& tokens = rotary.tokens;
    const int seq = tokens.token_seqs[row], slot = tokens.seq_slots[seq];
    const int in_slot =
        tokens.slot_lengths[slot] + tokens.first_token + row - tokens.seq_token_begin[seq];
    const int64_t page = int64_t{slot} * tokens.max_pages + in_slot / kPageSize;
    entry = tokens.page_table[page] * kPageSize + in_slot % kPageSize;
    if (is_value) return;
    const float position = static_cast<float>(tokens.positions[row]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rotations[half] =
          rotation_by(position * rotary.inv_freq[dim + half * 8], rotary.attention_scaling);
    }
  }
};

// Stores SiLU(gate) * up from sums over all of K. x has m rows, and a lane has rows q2, q2 + 1 of
// each 8. Its rows of W, as weight blocks order them, are n, n + 8, n + 16, n + 24; n mod 32 is g.
template <typename T, int kGroups>
__device__ __forceinline__ void store_gated(const GemmArgs& gemm, T* y,
                                            const float (&sums)[2][kGroups][4],
                                            const float* row_scales, int m, int n, int g, int q2) {
  const int columns = gemm.n / 2;
  T* to = y + int64_t{q2} * columns + n / 16 * 8 + g;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (group * 8 + q2 + j < m) {
        const float scale = row_scales[group * 8 + q2 + j];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          to[t * 8] = from_float<T>(silu_product(__fmul_rn(scale, sums[t][group][j]),
                                                 __fmul_rn(scale, sums[t][group][j + 2])));
        }
      }
      to += (j == 0 ? 1 : 7) * static_cast<int64_t>(columns);
    }
  }
}

// Rotates elements n, n + 8 of one token with their partners half a head further, and stores them
// to y or to the KV cache. `weight`: biases. The sum of element n is sum[0][j], that of n + 8
// sum[0][j + 2]. The sums of the partners are in sum[1].
template <typename T>
__device__ __forceinline__ void store_rotated(const GemmArgs& gemm, const Rotary& rotary,
                                              const TokenRotation& token, const T (&weight)[2][2],
                                              const float (&sum)[2][4], int j, float scale, int n,
                                              T* y) {
  const int dims = gemm.rope_pair_stride * 32, head = n / dims, dim = n % dims;
  const int kv_head = head - rotary.num_heads;
  const bool is_value = kv_head >= rotary.num_kv_heads;
  T* to = y + n;
  if (kv_head >= 0) {
    const int64_t page = token.entry / kPageSize;
    const int64_t at = page * rotary.num_kv_heads + kv_head % rotary.num_kv_heads;
    to = static_cast<T*>(is_value ? rotary.v_cache : rotary.k_cache) +
         (at * kPageSize + token.entry % kPageSize) * dims + dim;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      x[t] = to_float(finished(gemm, scale, sum[t][half * 2 + j], T()));
      if (rotary.bias != nullptr) x[t] += to_float(weight[t][half]);
    }
    if (!is_value) rotate(x[0], x[1], token.rotations[half]);
    to[half * 8] = from_float<T>(x[0]);
    to[dims / 2 + half * 8] = from_float<T>(x[1]);
  }
}

}  // namespace cpmcu::cuda::fused
