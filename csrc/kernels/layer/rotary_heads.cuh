// One head of rotary_kv.h: bias, RMSNorm and RoPE by a group of D / 16 lanes. rotary_kv and
// attention of plain decode steps (kernels/attention/few_rows.cuh) call the same functions, so
// their bits are the same. Every operation that the compiler could contract rounds explicitly
// (__fmaf_rn).
#pragma once

#include "core/vec.cuh"
#include "kernels/layer/rotary.cuh"

namespace cpmcu::cuda {

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

  __device__ PartPlace(int low_, int high_, bool rotates_)
      : low(low_), high(high_), rotates(rotates_) {}
  __device__ PartPlace(int lane, int rotary_dim) {
    const int rotated_lanes = rotary_dim / 16;
    rotates = lane < rotated_lanes;
    low = rotates ? 8 * lane : rotary_dim + 16 * (lane - rotated_lanes);
    high = low + (rotates ? rotary_dim / 2 : 8);
  }
};

template <typename T>
__device__ __forceinline__ HeadPart widened(const Vec16<T>& low, const Vec16<T>& high) {
  HeadPart part;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    part.low[i] = to_float(low[i]);
    part.high[i] = to_float(high[i]);
  }
  return part;
}
template <typename T>
__device__ __forceinline__ HeadPart load_part(const T* head, const PartPlace& at) {
  return widened<T>(load<T, 8>(head + at.low), load<T, 8>(head + at.high));
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
    x.low[i] = __fadd_rn(x.low[i], bias.low[i]);
    x.high[i] = __fadd_rn(x.high[i], bias.high[i]);
  }
}

// RMSNorm over a head. The lanes of the head are those of `group_mask`.
template <int kLanes>
__device__ __forceinline__ void normalize(HeadPart& x, const HeadPart& weight, float offset,
                                          float eps, uint32_t group_mask) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum = __fadd_rn(sum, __fmaf_rn(x.low[i], x.low[i], __fmul_rn(x.high[i], x.high[i])));
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(group_mask, sum, offset));
  }
  const float scale = rsqrtf(__fmaf_rn(sum, 1.0f / (kLanes * 16), eps));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x.low[i] = __fmul_rn(x.low[i], __fmul_rn(scale, __fadd_rn(weight.low[i], offset)));
    x.high[i] = __fmul_rn(x.high[i], __fmul_rn(scale, __fadd_rn(weight.high[i], offset)));
  }
}

__device__ __forceinline__ void rotate_part(HeadPart& x, const Rotation (&by)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) rotate(x.low[i], x.high[i], by[i]);
}

// The column of a head in a row of qkv. Heads are numbered q, k, v.
template <int kDim, typename T>
__device__ __forceinline__ int column_of_head(const RotaryKvArgs<T>& args, int head) {
  const int kv_head = head - args.num_heads, value_head = kv_head - args.num_kv_heads;
  return kv_head < 0      ? head * args.layout.q_head
         : value_head < 0 ? args.layout.k + kv_head * kDim
                          : args.layout.v + value_head * kDim;
}

// Applies bias, norm and rotation to a lane's part of a head of qkv.
template <int kDim, typename T>
__device__ __forceinline__ HeadPart rotated_head(const RotaryKvArgs<T>& args, HeadPart x, int head,
                                                 const PartPlace& at,
                                                 const Rotation (&rotations)[8],
                                                 uint32_t group_mask) {
  constexpr int kLanes = kDim / 16;
  const bool is_v = head >= args.num_heads + args.num_kv_heads;
  if (args.bias != nullptr) add(x, load_part(args.bias + head * kDim, at));
  const T* norm = head < args.num_heads ? args.q_norm : args.k_norm;
  if (!is_v && norm != nullptr) {
    normalize<kLanes>(x, load_part(norm, at), args.norm_offset, args.norm_eps, group_mask);
  }
  if (!is_v && at.rotates) rotate_part(x, rotations);
  return x;
}

template <typename T>
inline RotaryKvArgs<T> make_rotary_args(const RotaryKvParams& p) {
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

}  // namespace cpmcu::cuda
