// RMSNorm of a few rows of x into a CTA's shared memory, for kernels whose every CTA reads all
// rows.
#pragma once

#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/x_rows.cuh"
#include "kernels/moe/moe_route.h"

namespace cpmcu::cuda {
namespace {

constexpr int kNormedRows = 8;    // most rows that a CTA norms
constexpr int kMaxNormed = 4096;  // H up to which a CTA norms rows; 2 vectors of 8 a lane

struct RowsNorm {
  const void* x;       // [T, k]; null: no norm
  const void* weight;  // [k]
  float eps, offset;
  int warps;  // of rms_norm's CTA
};

// The warps of rms_norm's CTA for rows of k numbers.
inline int norm_warps_of(int64_t k) {
  int warps = 2;
  while (warps * 32 < k / 8) warps *= 2;
  return warps;
}

// Bytes from a row to the next. 16 bytes of padding keep the rows that lanes read together in
// different banks.
constexpr int normed_stride(int k) { return 2 * k + 16; }

// Warp w of a CTA of kCtaWarps does the work of warps w, w + kCtaWarps, ... of rms_norm's CTA. So
// sums have the same order.
template <int kCtaWarps>
constexpr int kVirtual = (kMaxNormed / 8 + 32 * kCtaWarps - 1) / (32 * kCtaWarps);

// Vector i of this thread.
template <int kCtaWarps>
__device__ __forceinline__ int normed_column(int i) {
  return (i * 32 * kCtaWarps + static_cast<int>(threadIdx.x)) * 8;
}

template <int kCtaWarps, typename T>
__device__ __forceinline__ void load_norm_weights(Vec16<T> (&weights)[kVirtual<kCtaWarps>],
                                                  const void* from, int k) {
#pragma unroll
  for (int i = 0; i < kVirtual<kCtaWarps>; ++i) {
    const int column = normed_column<kCtaWarps>(i);
    if (column < k) weights[i] = load<T, 8>(static_cast<const T*>(from) + column);
  }
}

// Norms m rows to `rows`. All threads of the CTA call it. `written(row, column, v)` gets the
// numbers of each thread.
template <int kCtaWarps, typename T, typename Written>
__device__ __forceinline__ void norm_rows(const RowsNorm& norm, int m, int k, char* rows,
                                          const Vec16<T> (&weights)[kVirtual<kCtaWarps>],
                                          float (&sums)[kNormedRows][32], const Written& written) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* x = static_cast<const T*>(norm.x);
#pragma unroll
  for (int row = 0; row < kNormedRows; ++row) {
    if (row >= m) break;
#pragma unroll
    for (int i = 0; i < kVirtual<kCtaWarps>; ++i) {
      if (i * kCtaWarps + warp >= norm.warps) break;
      float sum = 0;
      if (normed_column<kCtaWarps>(i) < k) {
        const Vec16<T> v = load<T, 8>(x + row * k + normed_column<kCtaWarps>(i));
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += to_float(v[j]) * to_float(v[j]);
      }
      sum = warp_reduce(sum, Sum());
      if (lane == 0) sums[row][i * kCtaWarps + warp] = sum;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int row = 0; row < m; ++row) {
    const float all = warp_reduce(lane < norm.warps ? sums[row][lane] : 0.0f, Sum());
    const float scale = rsqrtf(all / static_cast<float>(k) + norm.eps);
#pragma unroll
    for (int i = 0; i < kVirtual<kCtaWarps>; ++i) {
      const int column = normed_column<kCtaWarps>(i);
      if (column >= k) break;
      const Vec16<T> v = load<T, 8>(x + row * k + column);
      Vec16<T> normed;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        normed[j] = from_float<T>(to_float(v[j]) * scale * (to_float(weights[i][j]) + norm.offset));
      }
      store(reinterpret_cast<T*>(rows + row * normed_stride(k)) + column, normed);
      written(row, column, normed);
    }
  }
  __syncthreads();
}

}  // namespace
}  // namespace cpmcu::cuda
