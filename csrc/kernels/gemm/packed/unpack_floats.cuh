// Unpackers (unpack.cuh) of e4m3, and of e2m1 and e4m3 with group scales.
#pragma once

#include "kernels/gemm/packed/unpack_integers.cuh"

namespace cpmcu::cuda {
namespace {

// ---- e4m3

struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr int kBlock = kPackedRows * kPackedK;
  static constexpr int kScaleBytes = 4 * kPackedRows, kTileBytes = 0;
  static constexpr int kExtraBytes = kScaleBytes, kTileOffset = kBlock + kScaleBytes;
  static constexpr int kScaleSteps = 8;
  using Fragment = uint2;  // codes of rows g and g + 8
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1.0f / 256 : 1;

  template <typename T>
  struct Tile {};
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place, uint8_t) {
    return {};
  }

  // The exponent and mantissa of e4m3 are those of a float16 or bfloat16 number, shifted. Such a
  // float16 number is 2^-8 times as large. A bfloat16 number is 2^-120 times as large, too small
  // for sums in float32, so one multiplication restores it. Subnormal codes need no case of
  // their own.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>&,
                                                int) {
    const auto number = [](uint32_t upper) {  // decodes the upper byte of each half
      constexpr bool kHalf = std::is_same_v<T, __half>;
      const uint32_t bits =
          (kHalf ? upper >> 1 & 0x3F803F80 : upper >> 4 & 0x07F007F0) | (upper & 0x80008000);
      if constexpr (kHalf) return bits;
      constexpr uint32_t kTwoTo120 = 0x7B807B80, kMinusZero = 0x80008000;
      return bits_of(__hfma2(as_bf162(bits), as_bf162(kTwoTo120), as_bf162(kMinusZero)));
    };
    a[0] = number(codes.x), a[1] = number(codes.y);
    a[2] = number(codes.x << 8), a[3] = number(codes.y << 8);
  }

  static constexpr int tile_bytes(uint8_t) { return 0; }
  static constexpr int tile_row_bytes(uint8_t) { return 1; }
  static __host__ __device__ constexpr int scale_bytes(uint8_t by_eight) {
    return by_eight ? kScaleBytes / 8 : kScaleBytes;
  }
  static __device__ __forceinline__ int scale_place(int row, uint8_t by_eight) {
    return by_eight ? row / 8 * 4 : row * 4;
  }
  static __device__ __forceinline__ int scale_step(uint8_t by_eight) { return by_eight ? 4 : 32; }
  template <typename Place>
  static __device__ __forceinline__ float load_scale(Place row, int, uint8_t) {
    return load_float(row);
  }
};

// ---- floats with group scales

// The shared part of unpackers of floats with group scales. `kGroup`: k of a group scale. Eight
// rows share a float32 scale.
template <int kCodeBits, int kGroup>
struct GroupScales {
  static constexpr int kBits = kCodeBits;
  static constexpr int kBlock = kPackedRows * kPackedK * kBits / 8;
  static constexpr int kScaleBytes = kPackedRows / 8 * 4, kScaleSteps = 8;
  static constexpr int kTileWords = kPackedK / kGroup / 4,
                       kTileBytes = kPackedRows * kTileWords * 4;
  static constexpr int kExtraBytes = kScaleBytes + kTileBytes, kTileOffset = kBlock + kScaleBytes;

  // The group scales of rows g and g + 8.
  template <typename T>
  struct Tile {
    uint32_t rows[2][kTileWords];
  };
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place scales, uint8_t) {
    Tile<T> tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kTileWords; ++i) {
        tile.rows[half][i] = load_word(scales + half * 32 * kTileWords + 4 * i);
      }
    }
    return tile;
  }
  static constexpr int tile_bytes(uint8_t) { return kTileBytes; }
  static constexpr int tile_row_bytes(uint8_t) { return 4 * kTileWords; }

  // The group scale of row g or g + 8 at a k step, in both halves of a word: times 1 in float16,
  // times 2^112 in bfloat16. The bfloat16 numbers of codes are that much smaller.
  template <typename T>
  static __device__ __forceinline__ uint32_t scale_of(const Tile<T>& tile, int half, int step) {
    const int i = step * 16 / kGroup;
    if constexpr (kCodeBits == 4 && kGroup == 32) {
      // A multiply-add runs beside the logic operations and shifts that limit E2m1By32.
      const uint32_t byte = __byte_perm(tile.rows[half][i / 4], 0, 0x4440 + i % 4);
      return std::is_same_v<T, __half> ? byte * 0x00800080u : byte * 0x00100010u + 0x70007000u;
    }
    const uint32_t both = __byte_perm(tile.rows[half][i / 4], 0, 0x4040 + i % 4 * 0x0101);
    return std::is_same_v<T, __half> ? both << 7 : (both << 4) + 0x70007000;
  }
  template <typename T>
  static __device__ __forceinline__ uint32_t multiply(uint32_t numbers, uint32_t scales) {
    if constexpr (std::is_same_v<T, __half>) {
      return bits_of(__hmul2(as_half2(numbers), as_half2(scales)));
    } else {
      constexpr uint32_t kMinusZero = 0x80008000;
      return bits_of(__hfma2(as_bf162(numbers), as_bf162(scales), as_bf162(kMinusZero)));
    }
  }

  static constexpr int scale_bytes(uint8_t) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, uint8_t) { return row / 8 * 4; }
  static __device__ __forceinline__ int scale_step(uint8_t) { return 4; }
  template <typename Place>
  static __device__ __forceinline__ float load_scale(Place row, int, uint8_t) {
    return load_float(row);
  }
};

template <typename Scales>  // GroupScales
struct E2m1Numbers : Scales {
  using Fragment = uint32_t;
  template <typename T>
  static constexpr float kFactor = 1.0f / (1 << 14);

  // The exponent and mantissa of e2m1 are those of a float16 or bfloat16 number, shifted. Such a
  // number is 2^-14 or 2^-126 times as large; subnormal codes need no case of their own.
  //
  // For bfloat16 one multiplication copies a code to the place of the sign and to that of the
  // magnitude. Two shifts would take longer: they run where the logic operations run.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t word,
                                                const typename Scales::template Tile<T>& tile,
                                                int step) {
    constexpr int kPlace = std::is_same_v<T, __half> ? 9 : 6;  // place of the mantissa's lowest bit
    constexpr uint32_t kMagnitude = 0x00070007u << kPlace, kSign = 0x80008000;
    const uint32_t scales[2] = {Scales::template scale_of<T>(tile, 0, step),
                                Scales::template scale_of<T>(tile, 1, step)};
    const uint32_t halves[2] = {word, word >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // nibbles i and i + 4 of the word
      uint32_t number;
      if constexpr (std::is_same_v<T, __half>) {
        const int shift = kPlace - 4 * i;
        const uint32_t magnitude = (shift >= 0 ? word << shift : word >> -shift) & kMagnitude;
        number = ptx::masked_or(word << (12 - 4 * i), kSign, magnitude);
      } else {
        const int place = 4 * (i % 2);
        const uint32_t code = halves[i / 2] & (0x000F000Fu << place);
        number = code * ((1u << (12 - place)) + (1u << (kPlace - place))) & (kSign | kMagnitude);
      }
      a[i] = Scales::template multiply<T>(number, scales[i % 2]);
    }
  }
};

// e2m1 with groups of 16, or of 32. For 32, load_tile repeats each group scale, so that each 16 k
// have one.
struct E2m1 : E2m1Numbers<GroupScales<4, 16>> {
  static __host__ __device__ constexpr int tile_row_bytes(uint8_t by_16) { return by_16 ? 8 : 4; }
  static constexpr int tile_bytes(uint8_t by_16) { return kPackedRows * tile_row_bytes(by_16); }
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place scales, uint8_t by_16) {
    const uint32_t first = by_16 ? 0x3210 : 0x1100, second = by_16 ? 0x7654 : 0x3322;
    Tile<T> tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Place row = scales + half * 8 * tile_row_bytes(by_16);
      // With groups of 32, the second word belongs to another row and is not used.
      const uint32_t words[2] = {load_word(row), load_word(row + 4)};
      tile.rows[half][0] = __byte_perm(words[0], words[1], first);
      tile.rows[half][1] = __byte_perm(words[0], words[1], second);
    }
    return tile;
  }
};

// Groups of 32 only. For the experts' GEMM in decode steps, which is limited by its instructions: a
// block of 32 rows takes 405 of them instead of 465.
using E2m1By32 = E2m1Numbers<GroupScales<4, 32>>;

struct GroupedE4m3 : GroupScales<8, 32> {
  using Fragment = uint2;  // codes of rows g and g + 8
  template <typename T>
  static constexpr float kFactor = 1.0f / 256;

  // As E4m3. A bfloat16 number is 2^-120 times as large, and its group scale 2^112 times.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>& tile,
                                                int step) {
    const uint32_t scales[2] = {scale_of<T>(tile, 0, step), scale_of<T>(tile, 1, step)};
    const auto number = [&](uint32_t upper, int half) {  // decodes the upper byte of each half
      const uint32_t magnitude =
          std::is_same_v<T, __half> ? upper >> 1 & 0x3F803F80 : upper >> 4 & 0x07F007F0;
      return multiply<T>(ptx::masked_or(upper, 0x80008000, magnitude), scales[half]);
    };
    a[0] = number(codes.x, 0), a[1] = number(codes.y, 1);
    a[2] = number(codes.x << 8, 0), a[3] = number(codes.y << 8, 1);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
