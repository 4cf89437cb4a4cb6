// Tiles of an fp8 KV cache (kernels/layer/fp8_row.h) in shared memory, and their fragments.
//
// Codes become numbers of the model's dtype in registers: at most two logic operations and a shift
// for two codes, and a multiplication for bfloat16. Every e4m3 number is exact in both dtypes. The
// scales multiply score columns and probability columns, so the inner loops only convert.
//
// Surprising: ldmatrix reads rows of 16 bytes as eight 16-bit elements. A lane receives two
// neighbouring bytes where it would receive one element. The order of bytes in a row makes them
// numbers c and c + 8. So the even bytes of a register are one operand B, and the odd bytes are the
// next one. This holds with and without transposition.
#pragma once

#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

template <typename T>
struct Fp8Numbers;
template <>
struct Fp8Numbers<__half> {
  // The bits of a code as float16 are 2^-8 times its value, so kScale multiplies the scales.
  // Probabilities times scales then have about the size of the values. Without kScale they would
  // have the size of values / 448, which float16 could not hold well.
  static constexpr float kScale = 256;

  // `codes`: two codes in the high bytes of both halves.
  static __device__ __forceinline__ uint32_t of(uint32_t codes) {
    return (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1);
  }
};
template <>
struct Fp8Numbers<__nv_bfloat16> {
  static constexpr float kScale = 1;

  static __device__ __forceinline__ uint32_t of(uint32_t codes) {
    const uint32_t small = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 4);
    const uint32_t two_to_120 = 0x7b807b80u;
    const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(small),
                                          reinterpret_cast<const __nv_bfloat162&>(two_to_120));
    return reinterpret_cast<const uint32_t&>(scaled);
  }
};

// The even and the odd bytes of four codes.
template <typename T>
__device__ __forceinline__ void unpack_codes(uint32_t& even, uint32_t& odd, uint32_t codes) {
  even = Fp8Numbers<T>::of(codes << 8);
  odd = Fp8Numbers<T>::of(codes);
}

// Rows of D codes in panels of 128 bytes (64 if D = 64), and their scales. Chunks of 16 bytes are
// swizzled so that ldmatrix reads eight rows without bank conflicts.
template <typename T, int kRows_, int kDim_>
struct alignas(128) Fp8Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowBytes = kDim < 128 ? kDim : 128, kPanelBytes = kRows * kRowBytes;
  static constexpr int kRowChunks = kRowBytes / 16;
  static_assert(kDim % kRowBytes == 0 && (kRowBytes == 64 || kRowBytes == 128));

  __device__ __forceinline__ uint32_t address(int row, int c) const {
    const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    return ptx::shared_address(codes) + c / kRowChunks * kPanelBytes + row * kRowBytes +
           ((c % kRowChunks) ^ swizzle) * 16;
  }
  // Given the address of chunk i of a row: the address of chunk i + c. c is even, or i is 0.
  static __device__ __forceinline__ uint32_t further(uint32_t address, int c) {
    return (address ^ (c % kRowChunks * 16)) + c / kRowChunks * kPanelBytes;
  }

  uint8_t codes[kRows * kDim];
  float scales[kRows];
};

template <typename T, bool kFp8, int kRows, int kDim>
using CacheTile = std::conditional_t<kFp8, Fp8Tile<T, kRows, kDim>, SwizzledTile<T, kRows, kDim>>;

enum Operand { kKeys, kValues };

// Starts the copy of a tile of the cache. `offset`: of its first row, in elements. Rows from
// num_valid on become zero. kThreads threads take part; `thread` is the number of this thread.
template <int kThreads, typename T, int kRows, int kDim>
__device__ __forceinline__ void fetch_cache(SwizzledTile<T, kRows, kDim>& tile,
                                            const AttentionArgs<T>& args, Operand operand,
                                            int64_t offset, int num_valid, unsigned thread) {
  fetch_tile<kThreads>(tile, (operand == kKeys ? args.k_cache : args.v_cache) + offset, kDim,
                       num_valid, thread);
}
template <int kThreads, typename T, int kRows, int kDim>
__device__ __forceinline__ void fetch_cache(Fp8Tile<T, kRows, kDim>& tile,
                                            const AttentionArgs<T>& args, Operand operand,
                                            int64_t offset, int num_valid, unsigned thread) {
  constexpr int kChunks = kDim / 16;
  constexpr int kStep = kThreads / kChunks;  // rows of one iteration
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0,
                "all threads copy the same number of chunks");
  static_assert(kRows / 4 <= kThreads, "a thread copies at most four scales");
  const bool keys = operand == kKeys;
  const void* const cache = keys ? args.k_cache : args.v_cache;
  const int first = static_cast<int>(thread / kChunks);
  const int c = static_cast<int>(thread % kChunks);
  const uint8_t* source = static_cast<const uint8_t*>(cache) + offset + first * kDim + c * 16;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    // Rows at a distance of 8 have the same swizzle.
    const uint32_t to = tile.address(first + row % 8, c) + row / 8 * 8 * tile.kRowBytes;
    ptx::cp_async16(to, source + row * kDim, first + row < num_valid);
  }
  if (thread < kRows / 4) {
    const int row = static_cast<int>(thread) * 4;
    ptx::cp_async_first(ptx::shared_address(tile.scales + row),
                        (keys ? args.k_scales : args.v_scales) + offset / kDim + row,
                        min(max(num_valid - row, 0), 4) * 4);
  }
}

// Loads operands B of mma.m16n8k16 from 32 entries. Each lane points ldmatrix to one entry, that of
// its own number. `address` is where chunk 0 of this entry lies.
template <typename T, typename Tile>
struct Fp8Keys {
  uint32_t address;
  uint32_t codes[4];  // the lane's e4m3 codes of 32 entries

  // Entries [16 * n16, 16 * n16 + 16) as columns, as load_fragment_keys. For each k16, n16 ascends.
  __device__ __forceinline__ void operator()(uint32_t (&k)[4], int n16, int k16) {
    if (n16 % 2 == 0) {
      ptx::ldmatrix4(codes, Tile::further(address, k16) + n16 * 16 * Tile::kRowBytes);
    }
    unpack_codes<T>(k[0], k[1], codes[n16 % 2 * 2]);
    unpack_codes<T>(k[2], k[3], codes[n16 % 2 * 2 + 1]);
  }
};
template <typename T, typename Tile>
struct Fp8Values {
  uint32_t address;
  uint32_t codes[4];  // the lane's e4m3 codes of 32 entries

  // Dimensions [16 * n16, 16 * n16 + 16) as columns, as load_fragment_values. For each n16, k16
  // ascends.
  __device__ __forceinline__ void operator()(uint32_t (&v)[4], int k16, int n16) {
    if (k16 % 2 == 0) {
      ptx::ldmatrix4_trans(codes, Tile::further(address, n16) + k16 * 16 * Tile::kRowBytes);
    }
    unpack_codes<T>(v[0], v[2], codes[k16 % 2 * 2]);
    unpack_codes<T>(v[1], v[3], codes[k16 % 2 * 2 + 1]);
  }
};

// Fragments of the entries [entry, entry + 32) of a tile.
template <typename T, int kRows, int kDim>
__device__ __forceinline__ auto keys_from(Fp8Tile<T, kRows, kDim>& tile, int entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return Fp8Keys<T, Fp8Tile<T, kRows, kDim>>{tile.address(entry + lane, 0), {}};
}
template <typename T, int kRows, int kDim>
__device__ __forceinline__ auto values_from(Fp8Tile<T, kRows, kDim>& tile, int entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return Fp8Values<T, Fp8Tile<T, kRows, kDim>>{tile.address(entry + lane, 0), {}};
}
template <typename T, int kRows, int kDim>
__device__ __forceinline__ auto values_from(SwizzledTile<T, kRows, kDim>& tile, int entry) {
  return [&tile, entry](uint32_t (&v)[4], int k16, int n16) {
    load_fragment_values(v, tile, entry + k16 * 16, n16);
  };
}

// multiply_keys of tiles.cuh, for an fp8 tile.
template <typename T, int kRowTiles, int kTiles, int kRows, int kDim, typename LoadQ>
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kTiles][4],
                                              Fp8Tile<T, kRows, kDim>& keys, int entry,
                                              LoadQ load_q) {
  static_assert(kTiles % 4 == 0, "32 entries at a time");
  multiply_keys<T, kDim>(scores, load_q, keys_from(keys, entry));
}

// multiply_values of tiles.cuh, for an fp8 tile. One ldmatrix loads 16 entries of two chunks.
template <typename T, int kRowTiles, int kTiles, int kRows, int kDim>
__device__ __forceinline__ void multiply_values(RowTile<kDim> (&rows)[kRowTiles],
                                                const float (&p)[kRowTiles][kTiles][4],
                                                Fp8Tile<T, kRows, kDim>& values, int entry) {
  using Tile = Fp8Tile<T, kRows, kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t address = values.address(entry + lane % 16, lane / 16);
  uint32_t codes[4];
  multiply_values<T>(rows, p, [&](uint32_t (&v)[4], int k16, int n16) {
    if (n16 % 2 == 0) {
      ptx::ldmatrix4_trans(codes, Tile::further(address, n16) + k16 * 16 * Tile::kRowBytes);
    }
    unpack_codes<T>(v[0], v[2], codes[n16 % 2 * 2]);
    unpack_codes<T>(v[1], v[3], codes[n16 % 2 * 2 + 1]);
  });
}

// Multiplies the columns of a tile's scores or probabilities by the scales of their entries.
// scale_of(n) gives those of the lane's two columns of tile n.
template <typename T, int kTiles, typename ScaleOf>
__device__ __forceinline__ void scale_columns_by(float (&x)[kTiles][4], ScaleOf scale_of) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 scale = scale_of(n);
    const float by[2] = {__fmul_rn(scale.x, Fp8Numbers<T>::kScale),
                         __fmul_rn(scale.y, Fp8Numbers<T>::kScale)};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = __fmul_rn(x[n][i], by[i % 2]);
  }
}
// The same for 32 columns; `of_lane` is the scale of column `lane`.
template <typename T>
__device__ __forceinline__ void scale_columns_by_lane(float (&x)[4][4], float of_lane) {
  scale_columns_by<T>(x, [&](int n) {
    const int first = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    return make_float2(__shfl_sync(0xffffffffu, of_lane, first),
                       __shfl_sync(0xffffffffu, of_lane, first + 1));
  });
}
template <typename T, int kTiles, int kRows, int kDim>
__device__ __forceinline__ void scale_columns(float (&x)[kTiles][4],
                                              const Fp8Tile<T, kRows, kDim>& tile, int entry) {
  const float* scales = tile.scales + entry + static_cast<int>(threadIdx.x) % 4 * 2;
  scale_columns_by<T>(x, [&](int n) { return *reinterpret_cast<const float2*>(scales + n * 8); });
}
template <typename T, int kTiles, int kRows, int kDim>
__device__ __forceinline__ void scale_columns(float (&)[kTiles][4],
                                              const SwizzledTile<T, kRows, kDim>&, int) {}

}  // namespace cpmcu::cuda
