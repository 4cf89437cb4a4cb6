// Shared by the Hopper GEMMs of many rows with 4-bit W: the stages, a producer's copies, and the
// multiplication of half a weight block.
#pragma once

#include "kernels/gemm/large_tiles.cuh"
#include "kernels/gemm/packed/multiply.cuh"
#include "kernels/gemm/packed/wgmma.cuh"

namespace cpmcu::cuda {
namespace {

// Half of a weight block, 128 rows of W, with room for zero points.
constexpr int kHalfRows = kPackedRows / 2, kHalfWords = kScaleOffset / 2;
constexpr int kHalfScales = 2 * kHalfRows, kHalfZeros = kHalfRows;
constexpr int kHalfBytes = kHalfWords + 512;
static_assert(kHalfScales + kHalfZeros <= 512);

// Tiles have 8 kGroups rows of x.
template <int kGroups, int kOutBytes, int kBudget = kRingBytes>
struct PackedLargeRing : LargeRing<8 * kGroups * kRowBytes, kHalfBytes, kOutBytes, kBudget> {
  using Base = LargeRing<8 * kGroups * kRowBytes, kHalfBytes, kOutBytes, kBudget>;
  using Base::Base;
  static constexpr int kRows = 8 * kGroups;  // rows of x of a tile
  static constexpr int kXBytes = kRows * kRowBytes;
  static_assert(kRows * kLargeRowBytes <= kOutBytes);

  __device__ __forceinline__ uint32_t words(int stage) const { return Base::weights(stage); }
  __device__ __forceinline__ uint32_t scales(int stage) const { return words(stage) + kHalfWords; }
  __device__ __forceinline__ uint32_t zeros(int stage) const { return scales(stage) + kHalfScales; }
};

// The copies of one stage by the producer thread of CTA `rank` of a cluster: its half of a weight
// block; half of the rows of x, for both CTAs.
template <bool kZeros, typename Ring>
__device__ __forceinline__ void copy_half_block(const Ring& ring, int stage, const char* block,
                                                int rank, uint64_t policy) {
  constexpr int kComes = kHalfWords + kHalfScales + (kZeros ? kHalfZeros : 0);
  const auto copy = [&](uint32_t to, int offset, int bytes) {
    ptx::bulk_copy(to, block + offset + rank * bytes, bytes, ring.full(stage), policy);
  };
  ptx::mbarrier_expect_bytes(ring.full(stage), Ring::kXBytes + kComes);
  copy(ring.words(stage), 0, kHalfWords);
  copy(ring.scales(stage), kScaleOffset, kHalfScales);
  if constexpr (kZeros) copy(ring.zeros(stage), kZeroOffset, kHalfZeros);
}
template <typename Ring>
__device__ __forceinline__ void copy_half_rows(const Ring& ring, int stage, const TensorMap* x_map,
                                               int first_row, int k_block, int rank) {
  constexpr int kXRows = Ring::kRows / 2;
  const uint32_t to = ring.rows(stage) + rank * kXRows * 128;
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    ptx::tensor_multicast(to + panel * Ring::kRows * 128, x_map, k_block * kPackedK + panel * 64,
                          first_row + rank * kXRows, ring.full(stage), 0b11);
  }
}

// Which rows of half a weight block a consumer warp multiplies: one m16 tile of a warp tile.
struct HalfBlockRows {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = ptx::uniform_warp();
  const int warp_tile = warp / 2;
  const bool second = warp % 2 != 0;                                     // of the two m16 tiles
  const int first = warp_tile * kWarpTileRows + second * 16 + lane / 4;  // the lane's first row
};

// A lane's part of a consumer warp's 16 rows of half a weight block, one m16 tile of a warp tile.
template <typename T>
struct HalfBlockFragment {
  float scale[2];
  uint32_t low, high, words[4][2];

  template <bool kZeros, typename Ring>
  __device__ __forceinline__ void load(const Ring& ring, int stage, const HalfBlockRows& rows,
                                       bool bf16_scales) {
    int zero[2] = {8, 8};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = load_scale(ring.scales(stage) + 2 * (rows.first + half * 8), bf16_scales);
      if constexpr (kZeros) {
        zero[half] = ptx::load_shared_byte(ring.zeros(stage) + rows.first + half * 8);
      }
    }
    low = low_offset<T>(zero[0]), high = high_offset<T>(zero[1], zero[0]);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint4 both = ptx::load_shared16(ring.words(stage) + rows.warp_tile * kWarpTileBytes +
                                            pair * kPairBytes + rows.lane * 16);
      words[pair][0] = rows.second ? both.y : both.x;
      words[pair][1] = rows.second ? both.w : both.z;
    }
  }
};

// Multiplies a consumer warp's rows of half a weight block by the rows of x and adds the products
// to `sums`. Then releases the stage, which must have arrived before the call.
template <typename T, bool kZeros, typename Ring, int kGroups>
__device__ __forceinline__ void add_half_block(float (&sums)[kGroups][4], const Ring& ring,
                                               int stage, const HalfBlockRows& rows,
                                               bool bf16_scales, uint32_t peer_empty) {
  HalfBlockFragment<T> w;
  w.template load<kZeros>(ring, stage, rows, bf16_scales);
  float part[1][kGroups][4];
  WgmmaOf<1>::multiply_fragments<T, kGroups>(
      part, ring.rows(stage),
      [&](uint32_t (&a)[4], int pair, int step, int) {
        unpack<T>(a, w.words[pair][step], w.low, w.high);
      },
      [] {});
  ring.release(stage, peer_empty);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[group][i] = __fmaf_rn(w.scale[i / 2], part[0][group][i], sums[group][i]);
    }
  }
}

}  // namespace
}  // namespace cpmcu::cuda
