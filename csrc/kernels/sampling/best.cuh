// Finding the best of many values: integer keys in their order, the search for where the best
// begin, and the team of blocks that shares a row.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cpmcu::cuda {

// ---- order

// An integer image of a float, in the same order; -0 and 0 are one.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t image) {
  return __uint_as_float(image & 0x80000000u ? image ^ 0x80000000u : ~image);
}

// Keys that order tokens by value, and equal values by lower id first. No key is 0.
__device__ __forceinline__ uint64_t key_of(float value, int token) {
  return uint64_t{ordered(value)} << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ float value_of(uint64_t key) {
  return unordered(static_cast<uint32_t>(key >> 32));
}
__device__ __forceinline__ int token_of(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

// Where the `wanted` best of distinct keys begin: exactly that many are not below it; 0 where there
// are fewer. count(key) is how many are not below `key`, the same in all threads.
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

// The blocks that work on one row, ranked by blockIdx.x: a cluster, or one block where there are no
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
