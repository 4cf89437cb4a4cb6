// Multiplication of a weight block (packed.h) in shared memory with rows of x, by one warp.
//
// Scales never touch the weights. Unpacked numbers are exact in 16 bits, so the tensor cores sum
// codes * x over 128 k. One float32 multiply-add per sum and block applies the scale. Integers in
// smaller groups (Unpacker::kScaleSteps) apply it to the sums of a group. Unpacked floats include
// their group scales, still exactly.
#pragma once

#include <type_traits>

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/unpack.cuh"
#include "kernels/gemm/x_rows.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kRowBytes = 2 * kPackedK;  // bytes of a row of x in a stage

// Copies 128 k of all rows of x as two panels of 64 k (ptx::swizzled_chunk). By one thread.
template <int kGroups>
__device__ __forceinline__ void copy_rows(uint32_t to, const TensorMap* map, int k_block,
                                          uint32_t barrier) {
  ptx::tensor_copy(to, map, k_block * kPackedK, 0, barrier);
  ptx::tensor_copy(to + 8 * kGroups * 128, map, k_block * kPackedK + 64, 0, barrier);
}

// The same without TMA, by a warp: 128 k of m rows of x [m, k]. Elements beyond K become zero.
template <int kGroups>
__device__ __forceinline__ void copy_rows_async(uint32_t to, const void* x, int m, int k,
                                                int k_block) {
  const int chunk = threadIdx.x % 16, column = k_block * kPackedK + chunk * 8;
  const char* from = static_cast<const char*>(x) + int64_t{column} * 2;
#pragma unroll 4
  for (int row = threadIdx.x % 32 / 16; row < m; row += 2) {
    ptx::cp_async16(to + ptx::swizzled_chunk<8 * kGroups>(row, chunk), from + int64_t{row} * k * 2,
                    column < k);
  }
}

template <int kGroups>
__device__ __forceinline__ void clear(float (&sums)[kGroups][4]) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[group][i] = 0;
  }
}
template <int kTiles, int kGroups>
__device__ __forceinline__ void clear(float (&sums)[kTiles][kGroups][4]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) clear(sums[t]);
}

// Multiplication policy with mma.sync: a weight block by the rows of x of the same stage.
struct MmaSync {
  static constexpr bool kTensorMap = false;
  static constexpr int kTiles = 2;  // m16 tiles at a time

  template <int kGroups>
  using LaneRows = cuda::LaneRows<kGroups>;

  // `part`, `x_sums` and `tiles` belong to a group of k. `next_group` is called after each group
  // but the last.
  template <typename Unpacker, typename T, int kGroups, typename N, typename F>
  static __device__ __forceinline__ void multiply(
      float (&part)[2][kGroups][4], XSums<Unpacker, T, kGroups>& x_sums, int, uint32_t weights,
      uint32_t rows, const LaneRows<kGroups>& lane_rows,
      const typename Unpacker::template Tile<T> (&tiles)[2], N next_group, F meanwhile) {
    // Codes and rows of x of two k steps. They are loaded while the previous two k steps are
    // multiplied.
    CodePair<Unpacker> codes[2];
    uint32_t b[2][2][kGroups][2];
    const auto fetch = [&](int pair) {
      codes[pair % 2].load(weights + pair * kPairBytes<Unpacker>);
      auto& to = b[pair % 2];
      if constexpr (kGroups == 1) {
        uint32_t r[4];
        ptx::ldmatrix4(r, rows + lane_rows.at(pair * 4));
        to[0][0][0] = r[0], to[0][0][1] = r[1], to[1][0][0] = r[2], to[1][0][1] = r[3];
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int group = 0; group < kGroups; group += 2) {
            uint32_t r[4];
            ptx::ldmatrix4(r, rows + lane_rows.at(pair * 4 + step * 2) + group * 8 * 128);
            to[step][group][0] = r[0], to[step][group][1] = r[1];
            to[step][group + 1][0] = r[2], to[step][group + 1][1] = r[3];
          }
        }
      }
    };
    fetch(0);
    clear(part);
    if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair < 3) fetch(pair + 1);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          uint32_t a[4];
          Unpacker::template unpack<T>(a, codes[pair % 2].at(step, t), tiles[t], 2 * pair + step);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const auto& x = b[pair % 2][step][group];
            ptx::mma_16x8x16<T>(part[t][group], a, x[0], x[1]);
          }
        }
        if constexpr (kHasMinimum<Unpacker>) {
          uint32_t ones[4];
          x_sums.make_ones(ones);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const auto& x = b[pair % 2][step][group];
            ptx::mma_16x8x16<T>(x_sums.of[group], ones, x[0], x[1]);
          }
        }
        const int done = 2 * pair + step + 1;
        if (done < 8 && done % Unpacker::kScaleSteps == 0) next_group(done / Unpacker::kScaleSteps);
      }
    }
    meanwhile();
  }
};

// The lane's offsets in a weight block: its codes, and the scale of the first of its four rows,
// which are 8 apart.
template <typename Unpacker>
struct LaneWeights {
  uint32_t codes = threadIdx.x / 32 * kWarpTileBytes<Unpacker> + threadIdx.x % 32 * 16;
  uint32_t scale;

  __device__ __forceinline__ explicit LaneWeights(uint8_t form)
      : scale(kScaleOffset<Unpacker> + Unpacker::scale_place(row(), form)) {
    ptx::opaque(codes);  // so they are not recomputed for every block
    ptx::opaque(scale);
  }
  static __device__ __forceinline__ int row() {
    return threadIdx.x / 32 * kWarpTileRows + threadIdx.x % 32 / 4;
  }
  // The offset of the row's tile data (unpack.cuh). If scales have twice the bytes of tile data, it
  // is half that of the row's scale.
  __device__ __forceinline__ uint32_t tile(uint8_t form) const {
    if constexpr (Unpacker::kScaleBytes != 2 * Unpacker::kTileBytes) {
      return tile_offset<Unpacker>(form) + row() * Unpacker::tile_row_bytes(form);
    }
    return tile_offset<Unpacker>(form) + (scale - kScaleOffset<Unpacker>) / 2;
  }
};

// The scales and minima of a lane's four rows of a block. `kKept`: their records are in registers.
// A place is that of the first row, in shared memory.
template <typename Unpacker, bool kKept>
struct LaneRecords {
  __device__ __forceinline__ void load(uint32_t, uint32_t, uint8_t) {}
  __device__ __forceinline__ float scale(uint32_t place, int i, int k_group, uint8_t form) const {
    return Unpacker::load_scale(place + Unpacker::scale_step(form) * i, k_group, form);
  }
  __device__ __forceinline__ float minimum(uint32_t place, int i, int k_group, uint8_t form) const {
    return Unpacker::load_min(place + Unpacker::scale_step(form) * i, k_group, form);
  }
};
template <typename Unpacker>
struct LaneRecords<Unpacker, true> {
  typename Unpacker::Record scales[4], minima[4];

  __device__ __forceinline__ void load(uint32_t scale_place, uint32_t min_place, uint8_t form) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = Unpacker::scale_step(form) * i;
      scales[i] = Unpacker::load_record(scale_place + step, form);
      if constexpr (kHasMinimum<Unpacker>) {
        minima[i] = Unpacker::load_record(min_place + step, form);
      }
    }
  }
  __device__ __forceinline__ float scale(uint32_t, int i, int k_group, uint8_t form) const {
    return Unpacker::scale_at(scales[i], k_group, form);
  }
  __device__ __forceinline__ float minimum(uint32_t, int i, int k_group, uint8_t form) const {
    return Unpacker::min_at(minima[i], k_group, form);
  }
};

// sums += rows of x times this warp's 32 rows of a weight block, both in shared memory. Calls
// `poll` when the last mma instructions are issued. Each lane calls `release` after its last read
// of the stage.
template <typename Mma, typename Unpacker, typename T, int kGroups, typename F, typename G>
__device__ __forceinline__ void accumulate_block(
    float (&sums)[2][kGroups][4], uint32_t rows, uint32_t block,
    const typename Mma::template LaneRows<kGroups>& lane_rows, const LaneWeights<Unpacker>& lane,
    uint8_t form, F poll, G release) {
  float scale[2][2];
  [[maybe_unused]] float minimum[2][2];
  typename Unpacker::template Tile<T> tiles[2];
  LaneRecords<Unpacker, kKeepsRecords<Unpacker, kGroups>> records;
  records.load(block + lane.scale, block + lane.tile(form), form);
  const auto load_group = [&](int k_group) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[t][half] = records.scale(block + lane.scale, 2 * t + half, k_group, form);
        if constexpr (kHasMinimum<Unpacker>) {
          minimum[t][half] = records.minimum(block + lane.tile(form), 2 * t + half, k_group, form);
        }
      }
      const int tile_step = t * 16 * Unpacker::tile_row_bytes(form) + k_group;
      tiles[t] = Unpacker::template load_tile<T>(block + lane.tile(form) + tile_step, form);
    }
  };
  load_group(0);

#pragma unroll
  for (int first = 0; first < 2; first += Mma::kTiles) {
    float part[Mma::kTiles][kGroups][4];
    [[maybe_unused]] XSums<Unpacker, T, kGroups> x_sums;
    const auto add = [&] {
#pragma unroll
      for (int t = 0; t < Mma::kTiles; ++t) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums[first + t][group][i];
            sum = __fmaf_rn(scale[first + t][i / 2], part[t][group][i], sum);
            if constexpr (kHasMinimum<Unpacker>) {
              sum = __fmaf_rn(-minimum[first + t][i / 2], x_sums.of[group][i], sum);
            }
          }
        }
      }
    };
    const auto next_group = [&](int k_group) {
      add();
      clear(part);
      if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of);
      load_group(k_group);
    };
    const bool is_last = first + Mma::kTiles == 2;
    if (Unpacker::kScaleSteps < 8 && first > 0) load_group(0);
    Mma::template multiply<Unpacker, T, kGroups>(part, x_sums, first, block + lane.codes, rows,
                                                 lane_rows, tiles, next_group, [&] {
                                                   if (is_last) poll();
                                                 });
    if (is_last) release();
    add();
  }
}

}  // namespace
}  // namespace cpmcu::cuda
