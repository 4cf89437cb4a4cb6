// rotary_kv: bias, per-head RMSNorm, RoPE and the write into the paged cache, in one pass over qkv.
// qkv is [T, columns]; a page of the cache is [Hkv, 64, D], in T or in e4m3 with scales
// (fp8_row.h).
//
// Roofline: 4 bytes an element of qkv of HBM traffic. For one token: the latency of the dependent
// loads sequence -> slot -> length -> page.
//
// Schedule: a group of D / 16 lanes handles one head.
//   1. The CTA computes sine and cosine once for all its heads.
//   2. Each lane loads 8 elements of the lower half of R and the 8 that RoPE pairs with them.
//   3. Bias, norm and rotation in float32, without an exchange between lanes except the norm's sum.
//   4. One rounding; stores of 16 bytes to qkv (q) or to the cache (k, v).
//
// Surprising: with many tokens, a group loops over several heads of its token. The arithmetic of a
// head does not change.
#include <algorithm>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/trace.cuh"
#include "kernels/layer/rotary_heads.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("rotary_kv");

constexpr int kThreads = 64;

// ---- kernels

// Stores a head as e4m3 codes and their scale. The lanes exchange codes through `row`.
template <int kLanes>
__device__ __forceinline__ void store_fp8(uint8_t* codes, float* scale, uint8_t* row,
                                          const PartPlace& at, const HeadPart& x, int lane,
                                          uint32_t group_mask) {
  uint32_t max = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    max = ::max(max, ::max(magnitude_bits(x.low[i]), magnitude_bits(x.high[i])));
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    max = ::max(max, __shfl_xor_sync(group_mask, max, offset));
  }
  const Fp8Scale by(max);
  __syncwarp(group_mask);  // the previous row has been read
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    row[fp8_place(at.low + i)] = to_e4m3(__fmul_rn(x.low[i], by.inverse));
    row[fp8_place(at.high + i)] = to_e4m3(__fmul_rn(x.high[i], by.inverse));
  }
  __syncwarp(group_mask);
  reinterpret_cast<uint4*>(codes)[lane] = reinterpret_cast<const uint4*>(row)[lane];
  if (lane == 0) *scale = by.scale;
}

// Grid: (T, CTAs of a token). Heads are numbered q, k, v.
template <typename T, int kDim, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    rotary_kv_kernel(const __grid_constant__ RotaryKvArgs<T> args) {
  constexpr int kLanes = kDim / 16;
  constexpr int kGroups = kThreads / kLanes;
  static_assert(kLanes <= 32 && 32 % kLanes == 0, "a head must lie within one warp");
  Trace trace;
  ptx::pdl_launch();
  const int lane = threadIdx.x % kLanes;
  const PartPlace at(lane, args.rotary_dim);
  const uint32_t group_mask = (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 - lane);

  const StepTokens& tokens = args.tokens;
  const int row = blockIdx.x;
  const int seq = tokens.token_seqs[row];
  const int slot = tokens.seq_slots[seq];
  const int entry =
      tokens.slot_lengths[slot] + tokens.first_token + row - tokens.seq_token_begin[seq];

  const int num_qk_heads = args.num_heads + args.num_kv_heads;
  const int num_all_heads = num_qk_heads + args.num_kv_heads;
  const int first_head = blockIdx.y * kGroups + threadIdx.x / kLanes;
  __shared__ alignas(16) Rotation shared[kDim / 2];
  __shared__ alignas(16) uint8_t fp8_rows[kFp8 ? kGroups : 1][kFp8 ? kDim : 1];
  const float position = static_cast<float>(tokens.positions[row]);
  for (int i = threadIdx.x; i < args.rotary_dim / 2; i += kThreads) {
    shared[i] = rotation_by(position * args.inv_freq[i], args.attention_scaling);
  }
  __syncthreads();
  Rotation rotations[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) rotations[i] = shared[at.rotates ? at.low + i : i];

  ptx::pdl_wait();  // the reads before this line need no result of the previous kernel
  trace.stamp(1);

  T* qkv_row = args.qkv + int64_t{row} * args.layout.row;
  for (int head = first_head; head < num_all_heads; head += gridDim.y * kGroups) {
    const int column = column_of_head<kDim>(args, head);
    const HeadPart loaded = load_part(qkv_row + column, at);
    const HeadPart x = rotated_head<kDim>(args, loaded, head, at, rotations, group_mask);
    const bool is_q = head < args.num_heads, is_v = head >= num_qk_heads;
    T* out = qkv_row + column;
    if (!is_q) {
      const int kv_head = is_v ? head - num_qk_heads : head - args.num_heads;
      T* const cache = is_v ? args.v_cache : args.k_cache;
      const int64_t offset = kv_offset(tokens.page_table, tokens.max_pages, slot, entry, kv_head,
                                       args.num_kv_heads, kDim);
      if constexpr (kFp8) {
        store_fp8<kLanes>(reinterpret_cast<uint8_t*>(cache) + offset,
                          (is_v ? args.v_scales : args.k_scales) + offset / kDim,
                          fp8_rows[threadIdx.x / kLanes], at, x, lane, group_mask);
        continue;
      }
      out = cache + offset;
    }
    store_part(out, at, x);
  }
  trace.stamp(2);
  trace.end();
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: positions, token_seqs, seq_slots, seq_token_begin,
// slot_lengths, page_table.
void rotary_kv(const Context& ctx, const RotaryKvParams& p) {
  check_rotary_kv(p);
  const int num_rows = p.tokens.num_tokens;
  if (num_rows == 0) return;
  dispatch_int<64, 128, 256, 512>("rotary_kv: head_dim", p.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kGroups = kThreads / (kDim / 16);
    // Few tokens: one group for each head. Many tokens: the fewest CTAs a token that still fill the
    // GPU.
    const int ctas_of_heads = (p.num_heads + 2 * p.num_kv_heads + kGroups - 1) / kGroups;
    const int ctas_to_fill = (ctx.sm_count * 16 + num_rows - 1) / num_rows;
    const dim3 grid(num_rows, std::min(ctas_of_heads, ctas_to_fill));
    dispatch_half(p.qkv.dtype(), [&](auto t) {
      using T = decltype(t);
      const auto kernel =
          p.k_scales.empty() ? rotary_kv_kernel<T, kDim, false> : rotary_kv_kernel<T, kDim, true>;
      launch(ctx, kernel, grid, dim3(kThreads), 0, make_rotary_args<T>(p));
    });
  });
}

}  // namespace cpmcu::cuda
