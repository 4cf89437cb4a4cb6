// Where things lie in a packed block (w4a16.h), for kernels that take it by fragments.
#pragma once

#include "kernels/gemm/w4a16.h"

namespace cpmcu::cuda {
namespace {

constexpr int kSlabRows = 32;                     // of W, those of a warp
constexpr int kSlabs = kW4BlockRows / kSlabRows;  // in a block
constexpr int kPairBytes = 512;                   // of a slab, two steps of 16 k: 16 of each lane
constexpr int kSlabBytes = kW4BlockK / 32 * kPairBytes;
constexpr int kScaleOffset = kSlabs * kSlabBytes;
constexpr int kZeroOffset = kScaleOffset + 2 * kW4BlockRows;

// Of the 16 bytes of a lane: two steps of 16 k, two tiles of 16 rows each.
__device__ __forceinline__ uint32_t word_of(const uint4& words, int step, int tile) {
  return step == 0 ? (tile == 0 ? words.x : words.y) : (tile == 0 ? words.z : words.w);
}

}  // namespace
}  // namespace cpmcu::cuda
