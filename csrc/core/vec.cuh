// Vector loads and stores of up to 16 bytes, and conversion to and from float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/dispatch.h"

namespace cpmcu {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Rounds two floats to T and packs them into one register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// The inverse of pack2; exact.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// kN elements, loaded and stored with one instruction; kN * sizeof(T) is at most 16 bytes.
template <typename T, int kN>
struct alignas(kN * sizeof(T)) Vec {
  T v[kN];
  __device__ __forceinline__ T& operator[](int i) { return v[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

template <typename T>
using Vec16 = Vec<T, 16 / sizeof(T)>;

template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> load(const T* p) {
  return *reinterpret_cast<const Vec<T, kN>*>(p);
}
template <typename T, int kN>
__device__ __forceinline__ void store(T* p, const Vec<T, kN>& v) {
  *reinterpret_cast<Vec<T, kN>*>(p) = v;
}

// Calls f(T{}) with the device type of float16 or bfloat16 (the CUDA back end has no float32
// models).
template <typename F>
void dispatch_half(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF16:
      return f(__half{});
    case DType::kBF16:
      return f(__nv_bfloat16{});
    default:
      break;
  }
  throw Error(ErrorKind::kInvalid,
              format_text("dtype {} is not supported on CUDA; supported are float16, bfloat16",
                          name_of(dtype)));
}

}  // namespace cpmcu
