// Unpackers (unpack.cuh) of the K-quants of llama.cpp.
#pragma once

#include "kernels/gemm/packed/unpack_integers.cuh"

namespace cpmcu::cuda {
namespace {

// `kGroups`: of a row of a block. A row's record has a float16 number and a byte for each group.
template <int kGroups>
struct Records {
  static constexpr int kScaleSteps = 8 / kGroups, kRecord = 2 + kGroups;
  static constexpr int kScaleBytes = kPackedRows * kRecord;

  static constexpr int tile_row_bytes(uint8_t) { return kRecord; }
  static constexpr int scale_bytes(uint8_t) { return kScaleBytes; }
  static __device__ __forceinline__ int scale_place(int row, uint8_t) { return kRecord * row; }
  static __device__ __forceinline__ int scale_step(uint8_t) { return 8 * kRecord; }
  // A scale or minimum is the product of 11 and 8 bits, which float32 holds exactly.
  template <typename Place>
  static __device__ __forceinline__ float load_scale(Place row, int k_group, uint8_t) {
    const int byte = load_byte(row + 2 + k_group);
    return to_scale(load_half(row), false) * (kGroups == 8 ? static_cast<int8_t>(byte) : byte);
  }
  template <typename Place>
  static __device__ __forceinline__ float load_min(Place row, int k_group) {
    return to_scale(load_half(row), false) * load_byte(row + 2 + k_group);
  }
};

struct K4 : Records<4> {
  using Numbers = Int4<Zeros::kNone>;
  static constexpr bool kHasMinimum = true;
  static constexpr int kBits = Numbers::kBits, kBlock = Numbers::kBlock;
  static constexpr int kTileBytes = kScaleBytes, kTileOffset = kBlock + kScaleBytes;
  static constexpr int kExtraBytes = kScaleBytes + kTileBytes;
  using Fragment = Numbers::Fragment;
  template <typename T>
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1 : 0.25f;
  template <typename T>
  using Tile = Numbers::Tile<T>;

  static constexpr int tile_bytes(uint8_t) { return kTileBytes; }
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
