// What the products of up to 64 rows of x share, whatever the weights: eight warps multiply, and
// the rows of x come through a ring in shared memory.
#pragma once

#include "core/ptx.cuh"
#include "kernels/gemm/gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = kMaxSkinnyRows;
constexpr int kRingBytes = 226 * 1024;  // on Hopper, of the 227 KB that a block may have

// Where the multiplying warps want more registers than an equal share, on Hopper a whole warpgroup
// feeds and gives up its own: so many are left to its threads, and to those of the others.
constexpr int kFeedingRegisters = 40, kMultiplyingRegisters = 232;

// A CUtensorMap: how the copy engine finds rows (tensor_map.cuh makes one).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Where a lane finds its row of x for ldmatrix, in a stage: lane l gives the address of row l % 8
// of matrix l / 8, and a matrix is 8 rows of x and 8 k. With one group the four matrices are 32
// k, else 16 rows and 16 k. Entry i is for chunks from 2 i on; chunks 8 to 15 are the second
// panel.
template <int kGroups>
struct LaneRows {
  uint32_t offsets[4];

  __device__ __forceinline__ LaneRows() {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = kGroups == 1 ? lane % 8 : lane % 8 + 8 * (matrix / 2);
    const int chunk = kGroups == 1 ? matrix : matrix % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      offsets[i] = row * 128 + (((2 * i) ^ chunk ^ (lane & 7)) << 4);
      ptx::opaque(offsets[i]);  // or they are computed again for every stage
    }
  }
  __device__ __forceinline__ uint32_t at(int chunk) const {
    return offsets[chunk / 2 % 4] + chunk / 8 * (8 * kGroups * 128);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
