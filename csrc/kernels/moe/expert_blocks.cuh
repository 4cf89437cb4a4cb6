// Shared by the kernels that multiply pairs with weight blocks of experts: a warp tile of a block
// in shared memory, its copy, and its products.
#pragma once

#include "core/ptx.cuh"
#include "kernels/gemm/packed/multiply.cuh"

namespace cpmcu::cuda {
namespace {

// Waits until at most `pending` of this thread's copies are unfinished; up to 7.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 7:
      return ptx::cp_async_wait<7>();
    case 6:
      return ptx::cp_async_wait<6>();
    case 5:
      return ptx::cp_async_wait<5>();
    case 4:
      return ptx::cp_async_wait<4>();
    case 3:
      return ptx::cp_async_wait<3>();
    case 2:
      return ptx::cp_async_wait<2>();
    case 1:
      return ptx::cp_async_wait<1>();
    default:
      ptx::cp_async_wait<0>();
  }
}

// A warp tile of a weight block in shared memory.
template <typename Unpacker>
struct alignas(16) Stage {
  char codes[kWarpTileBytes<Unpacker>];
  char extra[Unpacker::kExtraBytes / kWarpTiles];  // scales, then tile data (unpack.cuh)
};

// Copies a warp tile of a weight block to a stage, asynchronously. By a warp.
template <typename Unpacker>
__device__ __forceinline__ void copy_warp_tile(Stage<Unpacker>* stage, const char* block, int tile,
                                               uint8_t form) {
  constexpr int kBytes = kWarpTileBytes<Unpacker>;
  const int lane = threadIdx.x % 32, row = tile * kWarpTileRows;
  const uint32_t to = ptx::shared_address(stage) + lane * 16;
  const char* codes = block + tile * kBytes + lane * 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += 512) ptx::cp_async16(to + i, codes + i);
  const int scale_lanes = Unpacker::scale_bytes(form) / kWarpTiles / 16;
  const int tile_lanes = Unpacker::tile_bytes(form) / kWarpTiles / 16;
  const auto copy_extra = [&](int i) {
    const uint32_t at = to + kBytes + (i - lane) * 16;
    if (i < scale_lanes) {
      ptx::cp_async16(at,
                      block + kScaleOffset<Unpacker> + Unpacker::scale_place(row, form) + i * 16);
    } else if (i < scale_lanes + tile_lanes) {
      ptx::cp_async16(at, block + Unpacker::kTileOffset + row * Unpacker::tile_row_bytes(form) +
                              (i - scale_lanes) * 16);
    }
  };
  constexpr int kLanes = Unpacker::kExtraBytes / kWarpTiles / 16;
  static_assert(kLanes <= 64, "at most two copies for each lane");
  copy_extra(lane);
  if constexpr (kLanes > 32) copy_extra(lane + 32);
}

// The end of a group of k: adds the scaled partial sums, and clears them. `g`: the lane's first
// row.
template <typename Unpacker, typename T, int kGroups>
__device__ __forceinline__ void add_scaled(float (&sums)[2][kGroups][4],
                                           float (&part)[2][kGroups][4],
                                           XSums<Unpacker, T, kGroups>& x_sums, const char* scales,
                                           int g, int k_group, uint8_t form) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int step = Unpacker::scale_step(form);
    const char* place = scales + Unpacker::scale_place(g, form) + 2 * t * step;
    const float scale[2] = {Unpacker::load_scale(place, k_group, form),
                            Unpacker::load_scale(place + step, k_group, form)};
    [[maybe_unused]] float minimum[2];
    if constexpr (kHasMinimum<Unpacker>) {
      const char* of = place + Unpacker::kScaleBytes / kWarpTiles;
      minimum[0] = Unpacker::load_min(of, k_group);
      minimum[1] = Unpacker::load_min(of + step, k_group);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[t][group][i] = __fmaf_rn(scale[i / 2], part[t][group][i], sums[t][group][i]);
        part[t][group][i] = 0;
        if constexpr (kHasMinimum<Unpacker>) {
          sums[t][group][i] = __fmaf_rn(-minimum[i / 2], x_sums.of[group][i], sums[t][group][i]);
        }
      }
    }
  }
  if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of);
}

// sums += the products of a warp tile of a weight block and up to 8 kGroups rows of x. By a warp.
// `has(group)`: whether the group has rows, the same in all lanes. `load_x(step, group, b)` writes
// the B fragment of a k step. `used_x(step)`: it is not needed any more.
template <typename Unpacker, typename T, int kGroups, typename Has, typename LoadX, typename UsedX>
__device__ __forceinline__ void multiply_warp_tile(float (&sums)[2][kGroups][4],
                                                   const Stage<Unpacker>& from, uint8_t form,
                                                   const Has& has, const LoadX& load_x,
                                                   const UsedX& used_x) {
  constexpr int kSteps = kPackedK / 16;
  const int lane = threadIdx.x % 32, g = lane / 4;
  typename Unpacker::template Tile<T> tiles[2];
  float part[2][kGroups][4] = {};
  [[maybe_unused]] XSums<Unpacker, T, kGroups> x_sums;
  [[maybe_unused]] uint32_t ones[4];
  if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of), x_sums.make_ones(ones);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int k_group = step / Unpacker::kScaleSteps;
    if (step % Unpacker::kScaleSteps == 0) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const char* place = from.extra + Unpacker::kScaleBytes / kWarpTiles + k_group +
                            (t * 16 + g) * Unpacker::tile_row_bytes(form);
        tiles[t] = Unpacker::template load_tile<T>(place, form);
      }
    }
    const StepCodes<Unpacker> codes(from.codes, step, lane);
    uint32_t a[2][4];
    Unpacker::template unpack<T>(a[0], codes.tile[0], tiles[0], step);
    Unpacker::template unpack<T>(a[1], codes.tile[1], tiles[1], step);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!has(group)) continue;
      uint32_t b[2];
      load_x(step, group, b);
#pragma unroll
      for (int t = 0; t < 2; ++t) ptx::mma_16x8x16<T>(part[t][group], a[t], b[0], b[1]);
      if constexpr (kHasMinimum<Unpacker>) {
        ptx::mma_16x8x16<T>(x_sums.of[group], ones, b[0], b[1]);
      }
      used_x(step);
    }
    if ((step + 1) % Unpacker::kScaleSteps != 0) continue;
    add_scaled<Unpacker, T, kGroups>(sums, part, x_sums, from.extra, g, k_group, form);
  }
}

// The number of warps that share K: at most 8, with 1.5 k blocks each on average.
int splits_of(int64_t k_blocks) {
  int splits = 1;
  while (splits < kWarps && k_blocks >= 3 * splits) splits *= 2;
  return splits;
}

}  // namespace
}  // namespace cpmcu::cuda
