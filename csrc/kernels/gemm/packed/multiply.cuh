// Multiplication of a weight block (packed.h) in shared memory with rows of x, by one warp.
//
// Scales never touch the weights. q - z is exact in 16 bits, so the tensor cores sum (q - z) * x
// over the 128 k of a group. One float32 multiply-add per sum and group applies the scale.
#pragma once

#include <type_traits>

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/block.cuh"
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

// Unpacks the eight q of a word to an A fragment of 16 rows x 16 k, times kUnpackedScale. `low` and
// `high` hold the constants that turn the biased numbers of rows g and g + 8 into q - z, exactly.
template <typename T>
__device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                       uint32_t high);

__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }
__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ __nv_bfloat162 as_bf162(uint32_t v) {
  return *reinterpret_cast<__nv_bfloat162*>(&v);
}
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 v) {
  return *reinterpret_cast<uint32_t*>(&v);
}

// float16: 0x6400 | b is the number 1024 + b. A byte b holds q of row g (r) and of row g + 8 (s),
// so it is 1024 + r + 16 s; let z and y be their zero points. Subtracting 1024 + 16 s + z leaves r
// - z. (1024 + 16 s + z) / 16 - (64 + z / 16 + y) is s - y. All steps are exact.
template <>
__device__ __forceinline__ void unpack<__half>(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                               uint32_t high) {
  const __half2 sixteenth = __float2half2_rn(1.0f / 16);
  const auto split = [&](uint32_t& of_low, uint32_t& of_high, uint32_t both) {
    const __half2 top = as_half2(ptx::masked_or(both, 0x00F000F0, low));
    of_low = bits_of(__hsub2(as_half2(both), top));
    of_high = bits_of(__hfma2(top, sixteenth, as_half2(high)));
  };
  split(a[0], a[1], ptx::masked_or(word, 0x00FF00FF, 0x64006400));
  split(a[2], a[3], __byte_perm(word, 0x64006400, 0x5351));
}
// bfloat16: 0x4300 | q is the number 128 + q. The mantissa has no room for 16 q beside it. But the
// bits of 16 q alone are the subnormal number q 2^-129, so one multiply-add with 2^127 is exact.
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                                      uint32_t high) {
  const auto multiply = [](uint32_t v, uint32_t by, uint32_t plus) {
    return bits_of(__hfma2(as_bf162(v), as_bf162(by), as_bf162(plus)));
  };
  constexpr uint32_t kQuarter = 0x3E803E80, kTwoTo127 = 0x7F007F00;
  const uint32_t next = word >> 8;
  a[0] = multiply(ptx::masked_or(word, 0x000F000F, 0x43004300), kQuarter, low);
  a[1] = multiply(word & 0x00F000F0, kTwoTo127, high);
  a[2] = multiply(ptx::masked_or(next, 0x000F000F, 0x43004300), kQuarter, low);
  a[3] = multiply(next & 0x00F000F0, kTwoTo127, high);
}
// Factor of unpacked numbers: (q - z) * kUnpackedScale.
template <typename T>
constexpr float kUnpackedScale = std::is_same_v<T, __half> ? 1 : 0.25f;

template <typename T>
__device__ __forceinline__ uint32_t low_offset(int zero) {
  if constexpr (std::is_same_v<T, __half>) return 0x64006400 | zero | zero << 16;
  return pack2<T>(-0.25f * (128 + zero), -0.25f * (128 + zero));
}
// `low_zero`: the zero point of the row 8 before.
template <typename T>
__device__ __forceinline__ uint32_t high_offset(int zero, int low_zero) {
  const float offset = std::is_same_v<T, __half> ? -(64 + zero + low_zero / 16.0f) : -0.25f * zero;
  return pack2<T>(offset, offset);
}

__device__ __forceinline__ float load_scale(uint32_t shared, bool bf16) {
  const uint16_t bits = ptx::load_shared_half(shared);
  return bf16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
}

// Multiplication policy with mma.sync: a weight block by the rows of x of the same stage.
struct MmaSync {
  static constexpr bool kTensorMap = false;
  static constexpr int kTiles = 2;  // m16 tiles at a time

  template <int kGroups>
  using LaneRows = cuda::LaneRows<kGroups>;

  template <typename T, int kGroups, typename F>
  static __device__ __forceinline__ void multiply(float (&part)[2][kGroups][4], int,
                                                  uint32_t weights, uint32_t rows,
                                                  const LaneRows<kGroups>& lane_rows,
                                                  const uint32_t (&low)[2],
                                                  const uint32_t (&high)[2], F meanwhile) {
    // Words and rows of x of two k steps. They are loaded while the previous two k steps are
    // multiplied.
    uint4 words[2];
    uint32_t b[2][2][kGroups][2];
    const auto fetch = [&](int pair) {
      words[pair % 2] = ptx::load_shared16(weights + pair * kPairBytes);
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
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[t][group][i] = 0;
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair < 3) fetch(pair + 1);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          uint32_t a[4];
          unpack<T>(a, word_of(words[pair % 2], step, t), low[t], high[t]);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const auto& x = b[pair % 2][step][group];
            ptx::mma_16x8x16<T>(part[t][group], a, x[0], x[1]);
          }
        }
      }
    }
    meanwhile();
  }
};

// The lane's offsets in a weight block: 16 bytes of q, and the scale of the first of its four rows,
// which are 8 apart.
struct LaneWeights {
  uint32_t words = threadIdx.x / 32 * kWarpTileBytes + threadIdx.x % 32 * 16;
  uint32_t scale = kScaleOffset + 2 * (threadIdx.x / 32 * kWarpTileRows + threadIdx.x % 32 / 4);

  __device__ __forceinline__ LaneWeights() {
    ptx::opaque(words);  // so they are not recomputed for every block
    ptx::opaque(scale);
  }
  __device__ __forceinline__ uint32_t zero() const {
    return kZeroOffset + (scale - kScaleOffset) / 2;
  }
};

// sums += rows of x times this warp's 32 rows of a weight block, both in shared memory. Calls
// `poll` when the last mma instructions are issued. Each lane calls `release` after its last read
// of the stage.
template <typename Mma, typename T, int kGroups, bool kZeros, typename F, typename G>
__device__ __forceinline__ void accumulate_block(
    float (&sums)[2][kGroups][4], uint32_t rows, uint32_t block,
    const typename Mma::template LaneRows<kGroups>& lane_rows, const LaneWeights& lane,
    bool bf16_scales, F poll, G release) {
  float scale[2][2];
  uint32_t low[2] = {low_offset<T>(8), low_offset<T>(8)};
  uint32_t high[2] = {high_offset<T>(8, 8), high_offset<T>(8, 8)};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[t][half] = load_scale(block + lane.scale + 2 * (t * 16 + half * 8), bf16_scales);
    }
    if constexpr (kZeros) {
      const uint32_t zeros = block + lane.zero() + t * 16;
      const int low_zero = ptx::load_shared_byte(zeros);
      low[t] = low_offset<T>(low_zero);
      high[t] = high_offset<T>(ptx::load_shared_byte(zeros + 8), low_zero);
    }
  }

#pragma unroll
  for (int first = 0; first < 2; first += Mma::kTiles) {
    float part[Mma::kTiles][kGroups][4];
    const bool is_last = first + Mma::kTiles == 2;
    Mma::template multiply<T, kGroups>(part, first, block + lane.words, rows, lane_rows, low, high,
                                       [&] {
                                         if (is_last) poll();
                                       });
    if (is_last) release();
#pragma unroll
    for (int t = 0; t < Mma::kTiles; ++t) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[first + t][group][i];
          sum = __fmaf_rn(scale[first + t][i / 2], part[t][group][i], sum);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cpmcu::cuda
