// The convolution of gated_delta_net.cu, and sums over lanes.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/delta_net/gated_delta_net.h"

namespace cpmcu::cuda::delta_net {

__device__ __forceinline__ float approximate_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + ptx::exp2_approx(-1.4426950408889634f * x));
}

template <typename T, int kN>
__device__ __forceinline__ void to_floats(float (&to)[kN], const Vec<T, kN>& x) {
  if constexpr (kN % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      const float2 pair = unpack2<T>(reinterpret_cast<const uint32_t*>(&x)[i / 2]);
      to[i] = pair.x, to[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) to[i] = to_float(x[i]);
  }
}

// The convolution of kN channels, rounded as the model's dtype. `x`: kConvTaps tokens, the last one
// is the token itself. `w`: [kN, kConvTaps] of these channels.
template <typename T, int kN>
__device__ __forceinline__ void convolve(float (&to)[kN], const Vec<T, kN>* x,
                                         const float (&w)[kN][kConvTaps]) {
  float taps[kConvTaps][kN];
#pragma unroll
  for (int t = 0; t < kConvTaps; ++t) to_floats(taps[t], x[t]);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float sum = __fmul_rn(w[i][0], taps[0][i]);
#pragma unroll
    for (int t = 1; t < kConvTaps; ++t) sum = __fmaf_rn(w[i][t], taps[t][i], sum);
    to[i] = __fmul_rn(sum, approximate_sigmoid(sum));
  }
  // Pairs round in one instruction.
#pragma unroll
  for (int i = 0; i + 1 < kN; i += 2) {
    const float2 pair = unpack2<T>(pack2<T>(to[i], to[i + 1]));
    to[i] = pair.x, to[i + 1] = pair.y;
  }
  if constexpr (kN % 2 != 0) to[kN - 1] = to_float(from_float<T>(to[kN - 1]));
}

template <typename T, int kN>
__device__ __forceinline__ void load_filters(float (&w)[kN][kConvTaps], const T* __restrict__ conv,
                                             int channel) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const Vec<T, kConvTaps> filters = load<T, kConvTaps>(conv + int64_t{channel + i} * kConvTaps);
#pragma unroll
    for (int t = 0; t < kConvTaps; ++t) w[i][t] = to_float(filters[t]);
  }
}

// Sums over kLanes neighbouring lanes, for each of kN numbers.
template <int kLanes, int kN>
__device__ __forceinline__ void sum_lanes(float (&x)[kN]) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
#pragma unroll
    for (float& each : x) {
      each = __fadd_rn(each, __shfl_xor_sync(0xffffffffu, each, distance));
    }
  }
}

}  // namespace cpmcu::cuda::delta_net
