// Unpackers (unpack.cuh) of the K-quants of llama.cpp.
#pragma once

#include "kernels/gemm/packed/unpack_integers.cuh"

namespace cpmcu::cuda {
namespace {

// `kGroups`: groups of k in a row of a block. A row's record has a float16 number and a byte for
// each group, or float16 numbers (PackedLayout::halves, kFirstForm).
template <int kGroups>
struct Records {
  static constexpr int kScaleSteps = 8 / kGroups;
  // With kFirstForm, all records hold float16 numbers.
  static constexpr bool kAllHalves = kGroups == 4;
  static constexpr int kScaleBytes = kPackedRows * (kAllHalves ? 8 : 2 + kGroups);

  static constexpr __host__ __device__ int record(uint8_t form) {
    return kAllHalves && form != 0 ? 2 * kGroups : 2 + kGroups;
  }
  static constexpr __host__ __device__ int tile_row_bytes(uint8_t form) { return record(form); }
  static constexpr __host__ __device__ int scale_bytes(uint8_t form) {
    return kPackedRows * record(form);
  }
  static __device__ __forceinline__ int scale_place(int row, uint8_t form) {
    return record(form) * row;
  }
  static __device__ __forceinline__ int scale_step(uint8_t form) { return 8 * record(form); }
  // A byte as a number: 2^23 + byte in float32, minus 2^23. Conversions would take longer.
  template <bool kSigned>
  static __device__ __forceinline__ float number_of(uint32_t byte) {
    constexpr uint32_t kTwoTo23 = 0x4B000000;
    if constexpr (kSigned) return __uint_as_float(kTwoTo23 | (byte ^ 0x80)) - (8388608.0f + 128);
    return __uint_as_float(kTwoTo23 | byte) - 8388608.0f;
  }
  // A scale is a float16 number, or a float16 number times an 8-bit integer. So is a minimum.
  // float32 holds both exactly.
  template <bool kSigned, typename Place>
  static __device__ __forceinline__ float load_number(Place row, int k_group, uint8_t form) {
    if (kAllHalves && form != 0) return to_scale(load_half(row + 2 * k_group), false);
    const uint16_t first = load_half(row);
    if (!kAllHalves && form != 0 && first == kHalvesTag) {
      return to_scale(load_half(row + 2 + k_group / 2 * 2), false);
    }
    const auto byte = static_cast<uint32_t>(load_byte(row + 2 + k_group));
    return to_scale(first, false) * number_of<kSigned>(byte);
  }

  // A record in registers: the bytes, then the first number. With kFirstForm, the records of kK4
  // are their four numbers.
  static constexpr int kLast = kGroups / 4;
  struct Record {
    uint32_t words[kLast + 1];
  };
  template <typename Place>
  static __device__ __forceinline__ Record load_record(Place row, uint8_t form) {
    const auto word_at = [](Place place) {
      return load_half(place) | static_cast<uint32_t>(load_half(place + 2)) << 16;
    };
    Record record;
    if (kAllHalves && form != 0) {
      record.words[0] = word_at(row), record.words[kLast] = word_at(row + 4);
      return record;
    }
#pragma unroll
    for (int i = 0; i < kLast; ++i) record.words[i] = word_at(row + 2 + 4 * i);
    record.words[kLast] = load_half(row);
    return record;
  }
  // As load_number, for a k_group that the compiler knows.
  template <bool kSigned>
  static __device__ __forceinline__ float number_at(const Record& record, int k_group,
                                                    uint8_t form) {
    const auto half_at = [&](int i) {
      return to_scale(static_cast<uint16_t>(record.words[i / 2] >> 16 * (i % 2)), false);
    };
    if (kAllHalves && form != 0) return half_at(k_group);
    const uint32_t first = record.words[kLast];
    if (!kAllHalves && form != 0 && first == kHalvesTag) return half_at(k_group / 2);
    const uint32_t byte = __byte_perm(record.words[k_group / 4], 0, 0x4440 | k_group % 4);
    return to_scale(static_cast<uint16_t>(first), false) * number_of<kSigned>(byte);
  }
  static __device__ __forceinline__ float scale_at(const Record& record, int k_group,
                                                   uint8_t form) {
    return number_at<kGroups == 8>(record, k_group, form);
  }
  static __device__ __forceinline__ float min_at(const Record& record, int k_group, uint8_t form) {
    return number_at<false>(record, k_group, form);
  }
  template <typename Place>
  static __device__ __forceinline__ float load_scale(Place row, int k_group, uint8_t form) {
    return load_number<kGroups == 8>(row, k_group, form);
  }
  template <typename Place>
  static __device__ __forceinline__ float load_min(Place row, int k_group, uint8_t form) {
    return load_number<false>(row, k_group, form);
  }
};

struct K4 : Records<4> {
  using Numbers = Int4<Zeros::kNone>;
  static constexpr bool kHasMinimum = true;
  static constexpr int kBits = Numbers::kBits, kBlock = Numbers::kBlock;
  static constexpr int kTileBytes = kScaleBytes, kExtraBytes = kScaleBytes + kTileBytes;
  using Fragment = Numbers::Fragment;
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 0.25f;
  template <typename T>
  using Tile = Numbers::Tile<T>;

  static constexpr __host__ __device__ int tile_offset(uint8_t form) {
    return kBlock + scale_bytes(form);
  }
  static constexpr __host__ __device__ int tile_bytes(uint8_t form) { return scale_bytes(form); }
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place, uint8_t) {
    return Tile<T>::of(0, 0);
  }
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], Fragment codes,
                                                const Tile<T>& tile, int step) {
    Numbers::unpack<T>(a, codes, tile, step);
  }
};

struct K8 : Records<8> {
  static constexpr int kBits = Int8::kBits, kBlock = Int8::kBlock;
  static constexpr int kTileBytes = 0, kTileOffset = kBlock + kScaleBytes;
  static constexpr int kExtraBytes = kScaleBytes;
  using Fragment = Int8::Fragment;
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 1.0f / 64;
  template <typename T>
  using Tile = Int8::Tile<T>;

  static constexpr int tile_bytes(uint8_t) { return 0; }
  template <typename T, typename Place>
  static __device__ __forceinline__ Tile<T> load_tile(Place, uint8_t) {
    return {Tile<T>::of(128), Tile<T>::of(128)};
  }
  template <typename T>
  static __device__ __forceinline__ void unpack(uint32_t (&a)[4], Fragment codes,
                                                const Tile<T>& tile, int step) {
    Int8::unpack<T>(a, codes, tile, step);
  }
};

struct K8WithMinimum : K8 {
  static constexpr bool kHasMinimum = true;
  static constexpr int kTileBytes = kScaleBytes, kExtraBytes = kScaleBytes + kTileBytes;
  static constexpr int tile_bytes(uint8_t) { return kTileBytes; }
};

template <typename Unpacker>
constexpr bool kHasMinimum = requires { Unpacker::kHasMinimum; };

// Does a lane keep the records of its rows in registers? For many rows of x too few are left.
template <typename Unpacker, int kGroups>
constexpr bool kKeepsRecords = requires { typename Unpacker::Record; } && kGroups <= 2;

// For unpackers with a minimum: the sum of each row of x over a group of k, from an mma with rows
// of ones. kFactor scales the ones, as it scales the unpacked numbers.
template <typename Unpacker, typename T, int kGroups, bool kUsed = kHasMinimum<Unpacker>>
struct XSums {};
template <typename Unpacker, typename T, int kGroups>
struct XSums<Unpacker, T, kGroups, true> {
  float of[kGroups][4];

  __device__ __forceinline__ static void make_ones(uint32_t (&a)[4]) {
    constexpr float kOne = Unpacker::template kFactor<T>;
#pragma unroll
    for (uint32_t& pair : a) pair = pack2<T>(kOne, kOne);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
