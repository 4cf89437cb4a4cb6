// Offsets within a weight block (packed.h), for kernels that read it by fragments.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarpTileRows = 32;                        // rows of W of a warp
constexpr int kWarpTiles = kPackedRows / kWarpTileRows;  // warp tiles of a weight block
constexpr int kPairBytes = 512;  // two k steps of a warp tile: 16 bytes a lane
constexpr int kWarpTileBytes = kPackedK / 32 * kPairBytes;
constexpr int kScaleOffset = kWarpTiles * kWarpTileBytes;
constexpr int kZeroOffset = kScaleOffset + 2 * kPackedRows;

// The word of k step `step` and m16 tile `tile` among the 16 bytes of a lane.
__device__ __forceinline__ uint32_t word_of(const uint4& words, int step, int tile) {
  return step == 0 ? (tile == 0 ? words.x : words.y) : (tile == 0 ? words.z : words.w);
}

}  // namespace
}  // namespace cpmcu::cuda
