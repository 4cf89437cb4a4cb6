// Multiplication of 16-bit weights in shared memory by one warp, with mma.sync.
#pragma once

#include "kernels/gemm/x_rows.cuh"

namespace cpmcu::cuda {
namespace {

// k of a stage, and bytes of its rows.
constexpr int kDenseK = 64, kDenseRowBytes = 2 * kDenseK;

// sums += 8 kGroups rows of x times 16 kTiles rows of W, 64 k. Rows have 128 bytes in shared memory
// and their 16-byte chunks are swizzled within 8 rows, as make_map's boxes are. `weights`: for each
// m16 tile, the address of the lane's ldmatrix row (dense_row_offset).
template <typename T, int kTiles, int kGroups>
__device__ __forceinline__ void accumulate_dense(float (&sums)[kTiles][kGroups][4], uint32_t rows,
                                                 const uint32_t (&weights)[kTiles],
                                                 const LaneRows<kGroups>& lane_rows) {
  uint32_t x[2][kGroups][2];  // operands B of two k steps of 16
#pragma unroll
  for (int step = 0; step < kDenseK / 16; ++step) {
    uint32_t r[4];
    if (kGroups > 1) {
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix4(r, rows + lane_rows.at(step * 2) + group * 8 * kDenseRowBytes);
        x[step % 2][group][0] = r[0], x[step % 2][group][1] = r[1];
        x[step % 2][(group + 1) % kGroups][0] = r[2], x[step % 2][(group + 1) % kGroups][1] = r[3];
      }
    } else if (step % 2 == 0) {
      ptx::ldmatrix4(r, rows + lane_rows.at(step * 2));
      x[0][0][0] = r[0], x[0][0][1] = r[1], x[1][0][0] = r[2], x[1][0][1] = r[3];
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t a[4];
      ptx::ldmatrix4(a, weights[t] ^ (step << 5));
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        ptx::mma_16x8x16<T>(sums[t][group], a, x[step % 2][group][0], x[step % 2][group][1]);
      }
    }
  }
}

// Byte offset of row `row` of a stage, for the lane that gives ldmatrix this row's address. Lanes 0
// to 15 give the first 8 k, the others the second 8.
__device__ __forceinline__ uint32_t dense_row_offset(int row) {
  const int lane = threadIdx.x % 32;
  return row * kDenseRowBytes + ((lane / 16 ^ lane % 8) << 4);
}

}  // namespace
}  // namespace cpmcu::cuda
