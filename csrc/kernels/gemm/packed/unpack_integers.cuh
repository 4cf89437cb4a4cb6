// Unpackers (unpack.cuh) of integers of 4 and 8 bits, and the loads that all unpackers use.
#pragma once

#include <type_traits>

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/block.cuh"

namespace cpmcu::cuda {
namespace {

__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }
__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ __nv_bfloat162 as_bf162(uint32_t v) {
  return *reinterpret_cast<__nv_bfloat162*>(&v);
}
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 v) {
  return *reinterpret_cast<uint32_t*>(&v);
}

__device__ __forceinline__ float to_scale(uint16_t bits, bool bf16) {
  return bf16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ int load_byte(uint32_t shared) { return ptx::load_shared_byte(shared); }
__device__ __forceinline__ int load_byte(const char* from) {
  return *reinterpret_cast<const uint8_t*>(from);
}
__device__ __forceinline__ uint16_t load_half(uint32_t shared) {
  return ptx::load_shared_half(shared);
}
__device__ __forceinline__ uint16_t load_half(const char* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}
__device__ __forceinline__ uint32_t load_word(uint32_t shared) {
  return ptx::load_shared_word(shared);
}
__device__ __forceinline__ uint32_t load_word(const char* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ float load_float(uint32_t shared) {
  return ptx::load_shared_float(shared);
}
__device__ __forceinline__ float load_float(const char* from) {
  return *reinterpret_cast<const float*>(from);
}

// ---- integers

// Bits of `form` (scale_form). kFirstForm: bfloat16 scales of integers, groups of 16 of e2m1, or
// one scale for eight rows of e4m3.
constexpr uint8_t kFirstForm = 1;
constexpr uint8_t kZerosForm = 2;  // integers whose groups have zero points

enum class Zeros { kNone, kAll, kByForm };

// The scales and zero points of integers. `kGroups`: scales of a row of a block.
template <Zeros kZeros, int kGroups>
struct IntegerScales {
  static constexpr int kScaleSteps = 8 / kGroups;
  static constexpr int kScaleBytes = 2 * kPackedRows * kGroups;
  static constexpr int kTileBytes = kZeros == Zeros::kNone ? 0 : kPackedRows * kGroups;
  static constexpr int kExtraBytes = kScaleBytes + kTileBytes;

  static constexpr __host__ __device__ bool has_zeros(uint8_t form) {
    return kZeros == Zeros::kByForm ? (form & kZerosForm) != 0 : kZeros == Zeros::kAll;
  }
  static constexpr __host__ __device__ bool is_bf16(uint8_t form) {
    return kZeros == Zeros::kByForm ? (form & kFirstForm) != 0 : form != 0;
  }
  static constexpr int tile_bytes(uint8_t form) { return has_zeros(form) ? kTileBytes : 0; }
  static constexpr int tile_row_bytes(uint8_t) { return kGroups; }
  static constexpr int scale_bytes(uint8_t) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, uint8_t) { return 2 * kGroups * row; }
  static __device__ __forceinline__ int scale_step(uint8_t) { return 16 * kGroups; }
  template <typename Place>
  static __device__ __forceinline__ float load_scale(Place row, int k_group, uint8_t form) {
    return to_scale(load_half(row + 2 * k_group), is_bf16(form));
  }
};

// ---- int4

template <Zeros kZeros, int kGroups = 1>
struct Int4 : IntegerScales<kZeros, kGroups> {
  using IntegerScales<kZeros, kGroups>::has_zeros;
  static constexpr int kBits = 4;
  static constexpr int kBlock = kPackedRows * kPackedK / 2;
  static constexpr int kTileOffset = kBlock + IntegerScales<kZeros, kGroups>::kScaleBytes;
  using Fragment = uint32_t;
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 0.25f;

  // Constants that turn the biased numbers of rows g and g + 8 into (q - z) * kFactor, exactly.
  template <typename T>
  struct Tile {
    uint32_t low, high;

    __device__ __forceinline__ static Tile of(int zero, int zero_8) {
      if constexpr (std::is_same_v<T, __half>) {
        const float offset = -(64 + zero_8 + zero / 16.0f);
        return {0x64006400 | static_cast<uint32_t>(zero | zero << 16), pack2<T>(offset, offset)};
      } else {
        return {pack2<T>(-0.25f * (128 + zero), -0.25f * (128 + zero)),
                pack2<T>(-0.25f * zero_8, -0.25f * zero_8)};
      }
    }
  };
  // `zeros`: the place of row g's zero point, which the zero points of later rows follow.
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place zeros, uint8_t form) {
    if (!has_zeros(form)) return Tile<T>::of(8, 8);
    const int zero = load_byte(zeros);
    return Tile<T>::of(zero, load_byte(zeros + 8 * kGroups));
  }

  // float16: 0x6400 | b is the number 1024 + b. A byte b holds q of row g (r) and of row g + 8 (s),
  // so it is 1024 + r + 16 s; let z and y be their zero points. Subtracting 1024 + 16 s + z leaves
  // r - z. (1024 + 16 s + z) / 16 - (64 + z / 16 + y) is s - y. All steps are exact.
  //
  // bfloat16: 0x4300 | q is the number 128 + q. The mantissa has no room for 16 q beside it. But
  // the bits of 16 q alone are the subnormal number q 2^-129, so one multiply-add with 2^127 is
  // exact.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t word,
                                                const Tile<T>& tile, int) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 sixteenth = __float2half2_rn(1.0f / 16);
      const auto split = [&](uint32_t& of_low, uint32_t& of_high, uint32_t both) {
        const __half2 top = as_half2(ptx::masked_or(both, 0x00F000F0, tile.low));
        of_low = bits_of(__hsub2(as_half2(both), top));
        of_high = bits_of(__hfma2(top, sixteenth, as_half2(tile.high)));
      };
      split(a[0], a[1], ptx::masked_or(word, 0x00FF00FF, 0x64006400));
      split(a[2], a[3], __byte_perm(word, 0x64006400, 0x5351));
    } else {
      const auto multiply = [](uint32_t v, uint32_t by, uint32_t plus) {
        return bits_of(__hfma2(as_bf162(v), as_bf162(by), as_bf162(plus)));
      };
      constexpr uint32_t kQuarter = 0x3E803E80, kTwoTo127 = 0x7F007F00;
      const uint32_t next = word >> 8;
      a[0] = multiply(ptx::masked_or(word, 0x000F000F, 0x43004300), kQuarter, tile.low);
      a[1] = multiply(word & 0x00F000F0, kTwoTo127, tile.high);
      a[2] = multiply(ptx::masked_or(next, 0x000F000F, 0x43004300), kQuarter, tile.low);
      a[3] = multiply(next & 0x00F000F0, kTwoTo127, tile.high);
    }
  }
};

// ---- int8

struct Int8 : IntegerScales<Zeros::kByForm, 4> {
  static constexpr int kBits = 8;
  static constexpr int kBlock = kPackedRows * kPackedK;
  static constexpr int kTileOffset = kBlock + kScaleBytes;
  using Fragment = uint2;  // codes of rows g and g + 8
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 1.0f / 64;

  // Constants that turn the biased numbers of rows g and g + 8 into (q - z) * kFactor, exactly.
  template <typename T>
  struct Tile {
    uint32_t zeros[2];

    __device__ __forceinline__ static uint32_t of(int zero) {
      if constexpr (std::is_same_v<T, __half>) {
        return 0x64006400 | static_cast<uint32_t>(zero | zero << 16);
      }
      return pack2<T>(-zero / 64.0f, -zero / 64.0f);
    }
  };
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place zeros, uint8_t form) {
    if (!has_zeros(form)) return {Tile<T>::of(128), Tile<T>::of(128)};
    return {Tile<T>::of(load_byte(zeros)), Tile<T>::of(load_byte(zeros + 8 * 4))};
  }

  // float16: 0x6400 | q is the number 1024 + q. bfloat16: the bits of q are the number q 2^-133,
  // subnormal or not, so one multiply-add with 2^127 is exact.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>& tile,
                                                int) {
    const auto number = [&](uint32_t lower, int half) {  // decodes the lower byte of each half
      if constexpr (std::is_same_v<T, __half>) {
        const uint32_t biased = ptx::masked_or(lower, 0x00FF00FF, 0x64006400);
        return bits_of(__hsub2(as_half2(biased), as_half2(tile.zeros[half])));
      } else {
        constexpr uint32_t kTwoTo127 = 0x7F007F00;
        const __nv_bfloat162 bits = as_bf162(lower & 0x00FF00FF);
        return bits_of(__hfma2(bits, as_bf162(kTwoTo127), as_bf162(tile.zeros[half])));
      }
    };
    a[0] = number(codes.x >> 8, 0), a[1] = number(codes.y >> 8, 1);
    a[2] = number(codes.x, 0), a[3] = number(codes.y, 1);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
