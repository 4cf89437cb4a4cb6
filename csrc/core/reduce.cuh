// Sums and maxima over a warp and over a CTA. The order is fixed, so results are bitwise
// reproducible.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cpmcu {

template <typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Every thread gets the result. kThreads is the CTA size; `scratch` holds 32 values of T.
template <int kThreads, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T value, T identity, T* scratch, Op op) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a CTA is 1 to 32 whole warps");
  constexpr int kWarps = kThreads / 32;
  value = warp_reduce(value, op);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < kWarps ? scratch[threadIdx.x % 32] : identity;
  value = warp_reduce(value, op);
  __syncthreads();  // scratch may be used again
  return value;
}

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

}  // namespace cpmcu
