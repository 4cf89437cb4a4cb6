// Common code of the Hopper GEMMs of many rows with W in weight blocks: the stages, the copies of a
// producer, and the multiplication of half a weight block.
#pragma once

#include "kernels/gemm/large_tiles.cuh"
#include "kernels/gemm/packed/multiply.cuh"
#include "kernels/gemm/packed/wgmma.cuh"

namespace cpmcu::cuda {
namespace {

// Half of a weight block, 128 rows of W: codes, then room for scales and tile data (unpack.cuh).
constexpr int kHalfRows = kPackedRows / 2;
template <typename Unpacker>
constexpr int kHalfCodes = kScaleOffset<Unpacker> / 2;
template <typename Unpacker>
constexpr int kHalfBytes = kHalfCodes<Unpacker> + (Unpacker::kExtraBytes / 2 + 511) / 512 * 512;

// For K-quants all kernels have tiles of 64 rows of x. With a minimum, registers would not hold the
// sums of 128 rows.
template <typename Unpacker>
constexpr bool kHasSmallTiles = std::is_same_v<Unpacker, K4> || std::is_base_of_v<K8, Unpacker>;
inline bool has_small_tiles(const PackedLayout& layout) {
  return layout.codes == Codes::kK4 || layout.codes == Codes::kK8;
}

// Tiles have 8 kGroups rows of x.
template <typename Unpacker, int kGroups, int kOutBytes, int kBudget = kRingBytes>
struct PackedLargeRing
    : LargeRing<8 * kGroups * kRowBytes, kHalfBytes<Unpacker>, kOutBytes, kBudget> {
  using Base = LargeRing<8 * kGroups * kRowBytes, kHalfBytes<Unpacker>, kOutBytes, kBudget>;
  using Base::Base;
  static constexpr int kRows = 8 * kGroups;  // rows of x in a tile
  static constexpr int kXBytes = kRows * kRowBytes;
  static_assert(kRows * kLargeRowBytes <= kOutBytes && Base::kStages > 1);

  __device__ __forceinline__ uint32_t codes(int stage) const { return Base::weights(stage); }
  __device__ __forceinline__ uint32_t scales(int stage) const {
    return codes(stage) + kHalfCodes<Unpacker>;
  }
  __device__ __forceinline__ uint32_t tiles(int stage) const {
    return scales(stage) + Unpacker::kScaleBytes / 2;
  }
};

// The copies of one stage by the producer thread of CTA `rank` of a cluster: its half of a weight
// block; half of the rows of x, for both CTAs.
template <typename Unpacker, typename Ring>
__device__ __forceinline__ void copy_half_block(const Ring& ring, int stage, const char* block,
                                                int rank, uint8_t form, uint64_t policy) {
  constexpr int kCodes = kHalfCodes<Unpacker>;
  const int scale_bytes = Unpacker::scale_bytes(form) / 2;
  const int tile_bytes = Unpacker::tile_bytes(form) / 2;
  const auto copy = [&](uint32_t to, int offset, int bytes) {
    ptx::bulk_copy(to, block + offset + rank * bytes, bytes, ring.full(stage), policy);
  };
  ptx::mbarrier_expect_bytes(ring.full(stage), Ring::kXBytes + kCodes + scale_bytes + tile_bytes);
  copy(ring.codes(stage), 0, kCodes);
  copy(ring.scales(stage), kScaleOffset<Unpacker>, scale_bytes);
  if (tile_bytes > 0) copy(ring.tiles(stage), tile_offset<Unpacker>(form), tile_bytes);
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

// The rows of half a weight block that a consumer warp multiplies: one m16 tile of a warp tile.
struct HalfBlockRows {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = ptx::uniform_warp();
  const int warp_tile = warp / 2;
  const bool second = warp % 2 != 0;  // the second of the warp tile's two m16 tiles
  const int first = warp_tile * kWarpTileRows + second * 16 + lane / 4;  // the lane's first row
};

// A lane's part of a consumer warp's 16 rows of half a weight block, one m16 tile of a warp tile.
template <typename Unpacker, typename T>
struct HalfBlockFragment {
  float scale[2];
  [[maybe_unused]] float minimum[2];
  typename Unpacker::template Tile<T> tile;
  typename Unpacker::Fragment codes[4][2];

  template <typename Ring>
  __device__ __forceinline__ void load_group(const Ring& ring, int stage, const HalfBlockRows& rows,
                                             uint8_t form, int k_group) {
    const int place = Unpacker::scale_place(rows.first, form);
    const int step = Unpacker::scale_step(form);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = Unpacker::load_scale(ring.scales(stage) + place + half * step, k_group, form);
    }
    const int tile_place = rows.first * Unpacker::tile_row_bytes(form);
    tile = Unpacker::template load_tile<T>(ring.tiles(stage) + tile_place + k_group, form);
    if constexpr (kHasMinimum<Unpacker>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        minimum[half] =
            Unpacker::load_min(ring.tiles(stage) + tile_place + half * step, k_group, form);
      }
    }
  }
  template <typename Ring>
  __device__ __forceinline__ void load(const Ring& ring, int stage, const HalfBlockRows& rows,
                                       uint8_t form) {
    load_group(ring, stage, rows, form, 0);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      CodePair<Unpacker> both;
      both.load(ring.codes(stage) + rows.warp_tile * kWarpTileBytes<Unpacker> +
                pair * kPairBytes<Unpacker> + rows.lane * 16);
      codes[pair][0] = both.at(0, rows.second);
      codes[pair][1] = both.at(1, rows.second);
    }
  }
};

// Multiplies a consumer warp's rows of half a weight block by the rows of x and adds the results to
// `sums`. Then releases the stage, which must have arrived before the call.
template <typename T, typename Unpacker, typename Ring, int kGroups>
__device__ __forceinline__ void add_half_block(float (&sums)[kGroups][4], const Ring& ring,
                                               int stage, const HalfBlockRows& rows, uint8_t form,
                                               uint32_t peer_empty) {
  HalfBlockFragment<Unpacker, T> w;
  w.load(ring, stage, rows, form);
  float part[1][kGroups][4];
  [[maybe_unused]] XSums<Unpacker, T, kGroups> x_sums;
  const auto add = [&] {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[group][i] = __fmaf_rn(w.scale[i / 2], part[0][group][i], sums[group][i]);
        if constexpr (kHasMinimum<Unpacker>) {
          sums[group][i] = __fmaf_rn(-w.minimum[i / 2], x_sums.of[group][i], sums[group][i]);
        }
      }
    }
  };
  WgmmaOf<1>::multiply_fragments<Unpacker, T, kGroups>(
      part, x_sums, ring.rows(stage),
      [&](uint32_t (&a)[4], int pair, int step, int) {
        Unpacker::template unpack<T>(a, w.codes[pair][step], w.tile, 2 * pair + step);
      },
      [&](int k_group) {
        add();
        w.load_group(ring, stage, rows, form, k_group);
      },
      [] {});
  ring.release(stage, peer_empty);
  add();
}

}  // namespace
}  // namespace cpmcu::cuda
