// Selection of the largest values: order-preserving integer keys, the search for the k-th largest
// key, and the team of CTAs that shares a row.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cpmcu::cuda {

// ---- order

// Order-preserving map from float to integer. -0 and 0 have the same image.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t image) {
  return __uint_as_float(image & 0x80000000u ? image ^ 0x80000000u : ~image);
}

// A key orders tokens by value, then by id: a lower id has the larger key. No key is 0.
__device__ __forceinline__ uint64_t key_of(float value, int token) {
  return uint64_t{ordered(value)} << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ float value_of(uint64_t key) {
  return unordered(static_cast<uint32_t>(key >> 32));
}
__device__ __forceinline__ int token_of(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

// The bound for which exactly `wanted` distinct keys are >= the bound; 0 if there are fewer keys.
// count(key) returns the number of keys >= `key`, equal in all threads.
template <typename Count>
__device__ uint64_t find_cut(int wanted, Count count) {
  uint64_t cut = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t higher = cut | uint64_t{1} << bit;
    const int found = count(higher);
    if (found >= wanted) cut = higher;
    if (found == wanted) break;
  }
  return cut;
}

// ---- teams

constexpr int kMaxTeamCtas = 8;

// The CTAs that work on one row, ranked by blockIdx.x: a cluster, or one CTA if the GPU has no
// clusters.
template <int kWanted>
struct TeamOf {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr int kCtas = kWanted;
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  template <typename T>
  __device__ static T* shared_of(int rank, T* shared) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else
  static constexpr int kCtas = 1;
  __device__ static void sync() { __syncthreads(); }
  template <typename T>
  __device__ static T* shared_of(int, T* shared) {
    return shared;
  }
#endif
};
using Team = TeamOf<kMaxTeamCtas>;

}  // namespace cpmcu::cuda
