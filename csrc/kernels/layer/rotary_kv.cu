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
#include "kernels/layer/rotary.cuh"

#include <algorithm>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/trace.cuh"
#include "core/vec.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("rotary_kv");

constexpr int kThreads = 64;

template <typename T>
struct RotaryKvArgs {
  T* qkv;                 // [T, columns of the layout]
  const T* bias;          // [(Hq + 2 Hkv) * D]; null: no bias
  const T* q_norm;        // [D]; null: no norm of q
  const T* k_norm;        // [D]; null: no norm of k
  const float* inv_freq;  // [R / 2] radians per position
  T* k_cache;             // [pages, Hkv, 64, D]
  T* v_cache;             // [pages, Hkv, 64, D]
  float* k_scales;        // [pages, Hkv, 64] scales of e4m3 codes; null: the caches hold T
  float* v_scales;        // [pages, Hkv, 64] scales of the values, or null
  float norm_eps;
  float norm_offset;
  float attention_scaling;
  int num_heads;     // Hq
  int num_kv_heads;  // Hkv
  int rotary_dim;    // R
  QkvLayout layout;
  StepTokens tokens;
};

// A lane's part of a head: two vectors of 8 elements. In the first R / 16 lanes, RoPE pairs the
// elements of the two vectors. The other lanes have 16 adjacent elements that are not rotated.
struct HeadPart {
  float low[8];
  float high[8];
};

// The first elements of a lane's two vectors within the head.
struct PartPlace {
  int low, high;
  bool rotates;

  __device__ PartPlace(int lane, int rotary_dim) {
    const int rotated_lanes = rotary_dim / 16;
    rotates = lane < rotated_lanes;
    low = rotates ? 8 * lane : rotary_dim + 16 * (lane - rotated_lanes);
    high = low + (rotates ? rotary_dim / 2 : 8);
  }
};

// ---- kernels

template <typename T>
__device__ __forceinline__ HeadPart load_part(const T* head, const PartPlace& at) {
  const Vec16<T> low = load<T, 8>(head + at.low), high = load<T, 8>(head + at.high);
  HeadPart part;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    part.low[i] = to_float(low[i]);
    part.high[i] = to_float(high[i]);
  }
  return part;
}

template <typename T>
__device__ __forceinline__ void store_part(T* head, const PartPlace& at, const HeadPart& part) {
  Vec16<T> low, high;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] = from_float<T>(part.low[i]);
    high[i] = from_float<T>(part.high[i]);
  }
  store(head + at.low, low);
  store(head + at.high, high);
}

__device__ __forceinline__ void add(HeadPart& x, const HeadPart& bias) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x.low[i] += bias.low[i];
    x.high[i] += bias.high[i];
  }
}

// RMSNorm over a head. The lanes of the head are those of `group_mask`.
template <int kLanes>
__device__ __forceinline__ void normalize(HeadPart& x, const HeadPart& weight, float offset,
                                          float eps, uint32_t group_mask) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x.low[i] * x.low[i] + x.high[i] * x.high[i];
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(group_mask, sum, offset);
  }
  const float scale = rsqrtf(sum / (kLanes * 16) + eps);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x.low[i] *= scale * (weight.low[i] + offset);
    x.high[i] *= scale * (weight.high[i] + offset);
  }
}

__device__ __forceinline__ void rotate_part(HeadPart& x, const Rotation (&by)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) rotate(x.low[i], x.high[i], by[i]);
}

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
    const bool is_q = head < args.num_heads, is_v = head >= num_qk_heads;
    const int column = is_q   ? head * args.layout.q_head
                       : is_v ? args.layout.v + (head - num_qk_heads) * kDim
                              : args.layout.k + (head - args.num_heads) * kDim;
    HeadPart x = load_part(qkv_row + column, at);
    if (args.bias != nullptr) add(x, load_part(args.bias + head * kDim, at));
    const T* norm = is_q ? args.q_norm : args.k_norm;
    if (!is_v && norm != nullptr) {
      normalize<kLanes>(x, load_part(norm, at), args.norm_offset, args.norm_eps, group_mask);
    }
    if (!is_v && at.rotates) rotate_part(x, rotations);

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

template <typename T>
RotaryKvArgs<T> make_args(const RotaryKvParams& p) {
  return {.qkv = p.qkv.as<T>(),
          .bias = p.bias.as<T>(),
          .q_norm = p.q_norm.as<T>(),
          .k_norm = p.k_norm.as<T>(),
          .inv_freq = p.inv_freq,
          .k_cache = p.k_cache.as<T>(),
          .v_cache = p.v_cache.as<T>(),
          .k_scales = p.k_scales.as<float>(),
          .v_scales = p.v_scales.as<float>(),
          .norm_eps = p.norm_eps,
          .norm_offset = p.norm_offset,
          .attention_scaling = p.attention_scaling,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .rotary_dim = rotary_dim_of(p),
          .layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim),
          .tokens = p.tokens};
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
      launch(ctx, kernel, grid, dim3(kThreads), 0, make_args<T>(p));
    });
  });
}

}  // namespace cpmcu::cuda
