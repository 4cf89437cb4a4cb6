// Unpackers: how the kernels read the weight blocks of a layout (layout.h).
//
// A kernel takes an unpacker as a template parameter. It has
//   kBits            of a code: 4 or 8; the codes are in the order of nibble_place or byte_place
//   kExtraBytes      most bytes of a block behind the codes
//   Fragment         a lane's codes of one m16 tile and one k step
//   kFactor<T>       unpacked numbers are the numbers of the layout times kFactor, exact in T
//   Tile<T>          what a lane keeps for the rows g and g + 8 of an m16 tile of a block
//   kTileOffset      of what Tile is made from: zero points or group scales; kTileBytes in a
//                    block, kTileRowBytes for a row
//   unpack<T>        Fragment, Tile and k step -> the A fragment of mma.m16n8k16
//   scale_place      of a row: byte offset of its scale in a block; scale_step: to the row 8
//                    further
//   load_scale       the float32 factor of a sum over kScaleSteps k steps
//   kScaleSteps      8, all of a block, or fewer: the scale of the next group is 2 bytes further,
//                    and what its Tile is made from 1 byte
// load_tile and load_scale take an address in shared memory, or a pointer.
// `form` is a number of the layout that kernels get at run time (scale_form).
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

// ---- int4

// `kGroups`: scales of a row of a block.
template <bool kHasZeros, int kGroups = 1>
struct Int4 {
  static constexpr int kBits = 4;
  static constexpr int kBlock = kPackedRows * kPackedK / 2;
  static constexpr int kScaleSteps = 8 / kGroups, kTileRowBytes = kGroups;
  static constexpr int kScaleBytes = 2 * kPackedRows * kGroups;
  static constexpr int kTileBytes = kHasZeros ? kPackedRows * kGroups : 0;
  static constexpr int kExtraBytes = kScaleBytes + kTileBytes, kTileOffset = kBlock + kScaleBytes;
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
        return {0x64006400 | zero | zero << 16, pack2<T>(offset, offset)};
      } else {
        return {pack2<T>(-0.25f * (128 + zero), -0.25f * (128 + zero)),
                pack2<T>(-0.25f * zero_8, -0.25f * zero_8)};
      }
    }
  };
  // `zeros`: the zero points from that of row g on, in shared memory.
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(uint32_t zeros) {
    if constexpr (!kHasZeros) return Tile<T>::of(8, 8);
    const int zero = ptx::load_shared_byte(zeros);
    return Tile<T>::of(zero, ptx::load_shared_byte(zeros + 8 * kTileRowBytes));
  }
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(const char* zeros) {
    if constexpr (!kHasZeros) return Tile<T>::of(8, 8);
    const auto* of = reinterpret_cast<const uint8_t*>(zeros);
    return Tile<T>::of(of[0], of[8 * kTileRowBytes]);
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

  // `form`: whether scales are bfloat16.
  static constexpr int scale_bytes(bool) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, bool) { return 2 * kGroups * row; }
  static __device__ __forceinline__ int scale_step(bool) { return 16 * kGroups; }
  static __device__ __forceinline__ float load_scale(uint32_t shared, bool bf16) {
    return to_scale(ptx::load_shared_half(shared), bf16);
  }
  static __device__ __forceinline__ float load_scale(const char* from, bool bf16) {
    return to_scale(*reinterpret_cast<const uint16_t*>(from), bf16);
  }
};

// ---- int8

struct Int8 {
  static constexpr int kBits = 8;
  static constexpr int kBlock = kPackedRows * kPackedK;
  static constexpr int kGroups = 4, kScaleSteps = 8 / kGroups, kTileRowBytes = 1;
  static constexpr int kScaleBytes = 2 * kPackedRows * kGroups, kTileBytes = 0;
  static constexpr int kExtraBytes = kScaleBytes, kTileOffset = kBlock + kScaleBytes;
  using Fragment = uint2;  // rows g and g + 8
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 1.0f / 64;

  template <typename T>
  struct Tile {};
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(uint32_t) {
    return {};
  }
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(const char*) {
    return {};
  }

  // float16: 0x6400 | q is the number 1024 + q. bfloat16: the bits of q are the number q 2^-133,
  // subnormal or not, so one multiply-add with 2^127 is exact.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>&,
                                                int) {
    const auto number = [](uint32_t lower) {  // of the lower byte of each half
      if constexpr (std::is_same_v<T, __half>) {
        const uint32_t biased = ptx::masked_or(lower, 0x00FF00FF, 0x64006400);
        return bits_of(__hsub2(as_half2(biased), as_half2(0x64806480)));  // 1152
      } else {
        constexpr uint32_t kTwoTo127 = 0x7F007F00, kMinusTwo = 0xC000C000;
        const __nv_bfloat162 bits = as_bf162(lower & 0x00FF00FF);
        return bits_of(__hfma2(bits, as_bf162(kTwoTo127), as_bf162(kMinusTwo)));
      }
    };
    a[0] = number(codes.x >> 8), a[1] = number(codes.y >> 8);
    a[2] = number(codes.x), a[3] = number(codes.y);
  }

  // `form`: whether scales are bfloat16.
  static constexpr int scale_bytes(bool) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, bool) { return 2 * kGroups * row; }
  static __device__ __forceinline__ int scale_step(bool) { return 16 * kGroups; }
  static __device__ __forceinline__ float load_scale(uint32_t shared, bool bf16) {
    return to_scale(ptx::load_shared_half(shared), bf16);
  }
  static __device__ __forceinline__ float load_scale(const char* from, bool bf16) {
    return to_scale(*reinterpret_cast<const uint16_t*>(from), bf16);
  }
};

// ---- e4m3

struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr int kBlock = kPackedRows * kPackedK;
  static constexpr int kScaleBytes = 4 * kPackedRows, kTileBytes = 0;
  static constexpr int kExtraBytes = kScaleBytes, kTileOffset = kBlock + kScaleBytes;
  static constexpr int kScaleSteps = 8, kTileRowBytes = 1;
  using Fragment = uint2;  // rows g and g + 8
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1.0f / 256 : 1;

  template <typename T>
  struct Tile {};
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(uint32_t) {
    return {};
  }
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(const char*) {
    return {};
  }

  // The exponent and mantissa of e4m3 are those of a float16 or bfloat16 number, shifted. Such a
  // float16 number is 2^-8 times as large. A bfloat16 number is 2^-120 times as large, too small
  // for sums in float32, so one multiplication restores it. Subnormal codes need no case of
  // their own.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>&,
                                                int) {
    const auto number = [](uint32_t upper) {  // of the upper byte of each half
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

  // `form`: whether eight rows share a scale.
  static __host__ __device__ constexpr int scale_bytes(bool by_eight) {
    return by_eight ? kScaleBytes / 8 : kScaleBytes;
  }
  static __device__ __forceinline__ int scale_place(int row, bool by_eight) {
    return by_eight ? row / 8 * 4 : row * 4;
  }
  static __device__ __forceinline__ int scale_step(bool by_eight) { return by_eight ? 4 : 32; }
  static __device__ __forceinline__ float load_scale(uint32_t shared, bool) {
    return ptx::load_shared_float(shared);
  }
  static __device__ __forceinline__ float load_scale(const char* from, bool) {
    return *reinterpret_cast<const float*>(from);
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
  static constexpr int kTileRowBytes = kPackedK / kGroup, kTileBytes = kPackedRows * kTileRowBytes;
  static constexpr int kExtraBytes = kScaleBytes + kTileBytes, kTileOffset = kBlock + kScaleBytes;

  // The group scales of rows g and g + 8.
  template <typename T>
  struct Tile {
    uint32_t rows[2][kTileRowBytes / 4];
  };
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(uint32_t scales) {
    Tile<T> tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kTileRowBytes / 4; ++i) {
        tile.rows[half][i] = ptx::load_shared_word(scales + half * 8 * kTileRowBytes + 4 * i);
      }
    }
    return tile;
  }
  template <typename T>
  static __device__ __forceinline__ Tile<T> load_tile(const char* scales) {
    Tile<T> tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kTileRowBytes / 4; ++i) {
        tile.rows[half][i] =
            *reinterpret_cast<const uint32_t*>(scales + half * 8 * kTileRowBytes + 4 * i);
      }
    }
    return tile;
  }

  // The group scale of row g or g + 8 at a k step, twice: times 1 in float16, times 2^112 in
  // bfloat16, whose numbers of codes are that much smaller.
  template <typename T>
  static __device__ __forceinline__ uint32_t scale_of(const Tile<T>& tile, int half, int step) {
    const int i = step * 16 / kGroup;
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

  static constexpr int scale_bytes(bool) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, bool) { return row / 8 * 4; }
  static __device__ __forceinline__ int scale_step(bool) { return 4; }
  static __device__ __forceinline__ float load_scale(uint32_t shared, bool) {
    return ptx::load_shared_float(shared);
  }
  static __device__ __forceinline__ float load_scale(const char* from, bool) {
    return *reinterpret_cast<const float*>(from);
  }
};

template <int kGroup>
struct E2m1 : GroupScales<4, kGroup> {
  using Base = GroupScales<4, kGroup>;
  using Fragment = uint32_t;
  template <typename T>
  static constexpr float kFactor = 1.0f / (1 << 14);

  // The exponent and mantissa of e2m1 are those of a float16 or bfloat16 number, shifted. Such a
  // number is 2^-14 or 2^-126 times as large; subnormal codes need no case of their own.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t word,
                                                const typename Base::template Tile<T>& tile,
                                                int step) {
    constexpr int kPlace = std::is_same_v<T, __half> ? 9 : 6;  // of the lowest bit of a mantissa
    constexpr uint32_t kMagnitude = 0x00070007u << kPlace, kSign = 0x80008000;
    const uint32_t scales[2] = {Base::template scale_of<T>(tile, 0, step),
                                Base::template scale_of<T>(tile, 1, step)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // nibbles i and i + 4 of the word
      const int shift = kPlace - 4 * i;
      const uint32_t magnitude = (shift >= 0 ? word << shift : word >> -shift) & kMagnitude;
      const uint32_t number = ptx::masked_or(word << (12 - 4 * i), kSign, magnitude);
      a[i] = Base::template multiply<T>(number, scales[i % 2]);
    }
  }
};

struct GroupedE4m3 : GroupScales<8, 32> {
  using Fragment = uint2;  // rows g and g + 8
  template <typename T>
  static constexpr float kFactor = 1.0f / 256;

  // As E4m3. A bfloat16 number is 2^-120 times as large, and its group scale 2^112 times.
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint2 codes, const Tile<T>& tile,
                                                int step) {
    const uint32_t scales[2] = {scale_of<T>(tile, 0, step), scale_of<T>(tile, 1, step)};
    const auto number = [&](uint32_t upper, int half) {  // of the upper byte of each half
      const uint32_t magnitude =
          std::is_same_v<T, __half> ? upper >> 1 & 0x3F803F80 : upper >> 4 & 0x07F007F0;
      return multiply<T>(ptx::masked_or(upper, 0x80008000, magnitude), scales[half]);
    };
    a[0] = number(codes.x, 0), a[1] = number(codes.y, 1);
    a[2] = number(codes.x << 8, 0), a[3] = number(codes.y << 8, 1);
  }
};

// ---- all

// Offsets within a block.
template <typename Unpacker>
constexpr int kPairBytes = 32 * 4 * Unpacker::kBits;  // two k steps of a warp tile
template <typename Unpacker>
constexpr int kWarpTileBytes = kPackedK / 32 * kPairBytes<Unpacker>;
template <typename Unpacker>
constexpr int kScaleOffset = kWarpTiles * kWarpTileBytes<Unpacker>;

// A lane's codes of two k steps of a warp tile.
template <typename Unpacker, int kBits = Unpacker::kBits>
struct CodePair;
template <typename Unpacker>
struct CodePair<Unpacker, 4> {
  uint4 words;

  __device__ __forceinline__ void load(uint32_t shared) { words = ptx::load_shared16(shared); }
  // Of k step `step` and m16 tile `tile`.
  __device__ __forceinline__ uint32_t at(int step, int tile) const {
    return step == 0 ? (tile == 0 ? words.x : words.y) : (tile == 0 ? words.z : words.w);
  }
};
template <typename Unpacker>
struct CodePair<Unpacker, 8> {
  uint4 steps[2];

  __device__ __forceinline__ void load(uint32_t shared) {
    steps[0] = ptx::load_shared16(shared);
    steps[1] = ptx::load_shared16(shared + kPairBytes<Unpacker> / 2);
  }
  __device__ __forceinline__ uint2 at(int step, int tile) const {
    const uint4& of = steps[step];
    return tile == 0 ? make_uint2(of.x, of.y) : make_uint2(of.z, of.w);
  }
};

// A lane's codes of one k step of a warp tile at `from` in shared memory, by generic loads.
template <typename Unpacker>
struct StepCodes {
  typename Unpacker::Fragment tile[2];

  __device__ __forceinline__ StepCodes(const char* from, int step, int lane) {
    if constexpr (Unpacker::kBits == 4) {
      const uint2 both = *reinterpret_cast<const uint2*>(from + step / 2 * kPairBytes<Unpacker> +
                                                         lane * 16 + step % 2 * 8);
      tile[0] = both.x, tile[1] = both.y;
    } else {
      const uint4 both =
          *reinterpret_cast<const uint4*>(from + step * (kPairBytes<Unpacker> / 2) + lane * 16);
      tile[0] = make_uint2(both.x, both.y), tile[1] = make_uint2(both.z, both.w);
    }
  }
};

// The run-time number of a layout that its unpacker gets.
inline bool scale_form(const PackedLayout& layout) {
  const bool integers = layout.codes == Codes::kInt4 || layout.codes == Codes::kInt8;
  return integers ? layout.scale_dtype == DType::kBF16 : layout.scale_rows == 8;
}

// Calls f(unpacker) for the layout. Throws if the CUDA kernels have none.
template <typename F>
void dispatch_unpacker(const PackedLayout& layout, F f) {
  switch (layout.codes) {
    case Codes::kInt4:
      if (layout.group == 0) return layout.zero_points ? f(Int4<true>{}) : f(Int4<false>{});
      return layout.zero_points ? f(Int4<true, 4>{}) : f(Int4<false, 4>{});
    case Codes::kInt8:
      return f(Int8{});
    case Codes::kE4m3:
      return layout.group == 0 ? f(E4m3{}) : f(GroupedE4m3{});
    case Codes::kE2m1:
      return layout.group == 16 ? f(E2m1<16>{}) : f(E2m1<32>{});
    case Codes::kOther:
      break;
  }
  CHECK(false, "a layout of packed weights from outside has no CUDA kernels, expected device cpu");
}

}  // namespace
}  // namespace cpmcu::cuda
