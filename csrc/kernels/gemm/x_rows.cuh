// Common code of the GEMMs of few rows of x. They have eight consumer warps, and rows of x pass
// through a pipeline in shared memory.
#pragma once

#include "core/ptx.cuh"
#include "kernels/gemm/gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = kMaxSkinnyRows;
// Bytes of stages on Hopper, of the 227 KB that a CTA may have.
constexpr int kRingBytes = 226 * 1024;

// Bytes of the stages of a CTA that takes nearly all shared memory of an SM: 98 KB on GeForce
// cards, 162 KB on an A100, kRingBytes on Hopper and B200.
inline int ring_bytes(const Context& ctx) {
  return static_cast<int>(std::min<int64_t>(kRingBytes, ctx.sm_shared_bytes - 2048));
}

// On Hopper, consumer warps that need more than an equal share of registers take them from a whole
// producer warpgroup. Registers per thread of both:
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

}  // namespace

struct alignas(64) TensorMap {  // a CUtensorMap, made by tensor_map.cuh
  uint64_t opaque[16];
};

namespace {

// The lane's ldmatrix address in a stage's rows of x. Lane l gives the address of row l % 8 of
// matrix l / 8; a matrix has 8 rows and 8 k. With one group the four matrices cover 32 k, else 16
// rows x 16 k. Entry i is for 16-byte chunks from 2 i on; chunks 8 to 15 are in the second panel.
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
      ptx::opaque(offsets[i]);  // so it is not recomputed for every stage
    }
  }
  __device__ __forceinline__ uint32_t at(int chunk) const {
    return offsets[chunk / 2 % 4] + chunk / 8 * (8 * kGroups * 128);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
