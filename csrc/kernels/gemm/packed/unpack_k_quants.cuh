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
  static constexpr bool kAllHalves = kGroups == 4;  // with kFirstForm
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
  // A scale is a float16 number, or a float16 number times an 8-bit integer. So is a minimum.
  // float32 holds both exactly.
  template <bool kSigned, typename Place>
  static __device__ __forceinline__ float load_number(Place row, int k_group, uint8_t form) {
    if (kAllHalves && form != 0) return to_scale(load_half(row + 2 * k_group), false);
    const uint16_t first = load_half(row);
    if (!kAllHalves && form != 0 && first == kHalvesTag) {
      return to_scale(load_half(row + 2 + k_group / 2 * 2), false);
    }
    const int byte = load_byte(row + 2 + k_group);
    return to_scale(first, false) * (kSigned ? static_cast<int8_t>(byte) : byte);
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

// For unpackers with a minimum: the sum of each row of x over a group of k, as a product with rows
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
