// Conversion to and from int4 weight blocks (layout.h): from checkpoints' layouts, from dense rows,
// and back to dense rows.
//
// Roofline: bytes read plus bytes written. All of it runs at load, except packed_dequantize, which
// serves prefill: 2 bytes written for each half byte read.
//
// Schedule: In int4_pack a CTA packs a weight block and a thread a word. In packed_quantize a CTA
// has 16 rows of a k block and a warp a row. In packed_dequantize a warp has a warp tile; the
// kernel's comment describes it.
//
// The surprising decision: packing gathers its nibbles one by one. Each source word is read up to
// eight times, from L1. An 8B model takes milliseconds, less than its transfer over the bus, and
// there is one simple function per format.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/block.cuh"
#include "kernels/gemm/packed/dequantize_numbers.cuh"
#include "kernels/gemm/packed/int4_pack.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

// An int4 block: the codes of each warp tile, in pairs of k steps, then scales and zero points.
constexpr int kPairBytes = 512, kWarpTileBytes = kPackedK / 32 * kPairBytes;
constexpr int kScaleOffset = kWarpTiles * kWarpTileBytes;
// The offset of the zero points in blocks with `groups` scales for a row.
__device__ __forceinline__ int zero_offset(int groups) {
  return kScaleOffset + 2 * kPackedRows * groups;
}

// The word of k step `step` and m16 tile `tile` among the 16 bytes of a lane.
__device__ __forceinline__ uint32_t word_of(const uint4& words, int step, int tile) {
  return step == 0 ? (tile == 0 ? words.x : words.y) : (tile == 0 ? words.z : words.w);
}

struct PackArgs {
  char* blocks;
  const uint32_t* q;
  const uint16_t* scales;
  const uint32_t* zeros;  // null: W has no zero points
  Int4Format format;
  int words;                    // number of int32 words in q's second dimension
  int groups;                   // number of groups along K in the file
  int k_per_scale;              // inputs that share a scale in the file; not read if `groups` is 1
  int block_groups;             // number of scales in a row of a weight block
  bool by_channel;              // scales are channel-wise: Marlin permutes them in another way
  int n, k;                     // size of the part
  int gated_rows;               // N of a gated W; 0: W is not gated
  int first_row_block;          // number of the grid's first row block
  int first_row, end_row;       // rows to write: [first_row, end_row)
  int first_k_block, k_blocks;  // number of the part's first k block; number of all k blocks of W
  int64_t block_bytes;
};

__device__ __forceinline__ int q_of(const PackArgs& p, int n, int k) {
  switch (p.format) {
    case Int4Format::kGptq:
    case Int4Format::kGptqV2:
      return p.q[static_cast<int64_t>(k / 8) * p.words + n] >> (4 * (k % 8)) & 15;
    case Int4Format::kAwq:
      return p.q[static_cast<int64_t>(k) * p.words + n / 8] >> (4 * (n % 8 / 2 + n % 2 * 4)) & 15;
    case Int4Format::kCompressed:
      return p.q[static_cast<int64_t>(n) * p.words + k / 8] >> (4 * (k % 8)) & 15;
    case Int4Format::kMarlin:
      break;
  }
  const int lane = 4 * (n % 8) + k % 8 / 2, nibble = k / 8 % 2 + 2 * (n / 8 % 2) + 4 * (k % 2);
  const int word = 128 * (n / 64) + 4 * lane + n % 64 / 16;
  return p.q[static_cast<int64_t>(k / 16) * p.words + word] >> (4 * nibble) & 15;
}

__device__ __forceinline__ uint16_t scale_of(const PackArgs& p, int n, int group) {
  if (p.format == Int4Format::kCompressed)
    return p.scales[static_cast<int64_t>(n) * p.groups + group];
  int column = n;
  if (p.format == Int4Format::kMarlin) {
    column = !p.by_channel ? n / 64 * 64 + n % 8 * 8 + n % 64 / 8
                           : n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
  }
  return p.scales[static_cast<int64_t>(group) * p.n + column];
}

__device__ __forceinline__ int zero_of(const PackArgs& p, int n, int group) {
  const auto nibble = [&](int64_t word, int i) {
    return static_cast<int>(p.zeros[word] >> (4 * i) & 15);
  };
  const int64_t row_word = static_cast<int64_t>(group) * (p.n / 8) + n / 8;
  switch (p.format) {
    case Int4Format::kGptq:
      return (nibble(row_word, n % 8) + 1) & 15;
    case Int4Format::kGptqV2:
      return nibble(row_word, n % 8);
    case Int4Format::kAwq:
      return nibble(row_word, n % 8 / 2 + n % 2 * 4);
    default:
      return nibble(static_cast<int64_t>(n / 8) * p.groups + group, n % 8);
  }
}

// Row and k of nibble `nibble` of word `word`: the inverse of nibble_place.
struct Place {
  int row, k;
};
__device__ __forceinline__ Place place_of(int word, int nibble) {
  const int lane = word / 4 % 32, step = word / 128 % 4 * 2 + word / 2 % 2;
  const int row = word / 512 * kWarpTileRows + word % 2 * 16 + nibble % 2 * 8 + lane / 4;
  return {row, 16 * step + nibble / 2 % 2 * 8 + lane % 4 * 2 + nibble / 4};
}

// ---- kernels

// Packs a weight block; blockIdx.x along K, blockIdx.y along the rows of the part.
__global__ void __launch_bounds__(kThreads) int4_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int k_block = p.first_k_block + blockIdx.x;
  const int row_block = p.first_row_block + blockIdx.y;
  const int row0 = row_block * kPackedRows, k0 = blockIdx.x * kPackedK;
  const auto source_row = [&](int row) {
    return p.gated_rows > 0 ? static_cast<int>(gated_row(p.gated_rows, row)) : row;
  };
  char* block = p.blocks + (static_cast<int64_t>(row_block) * p.k_blocks + k_block) * p.block_bytes;
  uint32_t* words = reinterpret_cast<uint32_t*>(block);
  // If a part does not begin at a multiple of 16, a word holds rows of two parts: keep the bits of
  // the other part.
  for (int word = threadIdx.x; word < kScaleOffset / 4; word += kThreads) {
    uint32_t bits = 0, mask = 0;
    for (int i = 0; i < 8; ++i) {
      const Place at = place_of(word, i);
      const int row = source_row(row0 + at.row), n = row - p.first_row, k = k0 + at.k;
      if (row < p.first_row || row >= p.end_row) continue;
      const uint32_t q = n < p.n && k < p.k ? q_of(p, n, k) : 8;
      bits |= q << (4 * i), mask |= 15u << (4 * i);
    }
    if (mask != 0) words[word] = mask == 0xFFFFFFFF ? bits : (words[word] & ~mask) | bits;
  }
  const int row = source_row(row0 + threadIdx.x), n = row - p.first_row;
  if (row < p.first_row || row >= p.end_row) return;
  for (int i = 0; i < p.block_groups; ++i) {
    const int k = k0 + i * (kPackedK / p.block_groups);
    const int at = static_cast<int>(threadIdx.x) * p.block_groups + i;
    const bool inside = n < p.n && k < p.k;
    const int group = p.groups == 1 ? 0 : k / p.k_per_scale;
    reinterpret_cast<uint16_t*>(block + kScaleOffset)[at] = inside ? scale_of(p, n, group) : 0;
    if (p.zeros == nullptr) continue;
    block[zero_offset(p.block_groups) + at] = static_cast<char>(inside ? zero_of(p, n, group) : 8);
  }
}

struct QuantizeArgs {
  char* blocks;
  const void* x;     // [rows, K]
  const int* index;  // [N] row numbers of x; null: no index
  int n, k, k_blocks, planes;
  int64_t block_bytes;
  bool bf16_scales, gated;
};

// Quantises 16 rows of a k block; blockIdx.x along K (of one nibble plane), blockIdx.y along N.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    packed_quantize_kernel(const __grid_constant__ QuantizeArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  constexpr int kRows = 16;
  __shared__ int8_t level[kRows][kPackedK];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_block = blockIdx.y / (kPackedRows / kRows);
  const int first = blockIdx.y % (kPackedRows / kRows) * kRows;  // row within the weight block
  const auto block_of = [&](int plane) {
    const int k_block = plane * (p.k_blocks / p.planes) + blockIdx.x;
    return p.blocks + (static_cast<int64_t>(row_block) * p.k_blocks + k_block) * p.block_bytes;
  };
  for (int i = warp; i < kRows; i += kThreads / 32) {
    const int n = row_block * kPackedRows + first + i;
    const int64_t source = n >= p.n             ? 0
                           : p.index != nullptr ? p.index[n]
                           : p.gated            ? gated_row(p.n, n)
                                                : n;
    float v[4], largest = 0;
    for (int j = 0; j < 4; ++j) {
      const int k = blockIdx.x * kPackedK + j * 32 + lane;
      v[j] = n < p.n && k < p.k ? to_float(static_cast<const T*>(p.x)[source * p.k + k]) : 0;
      largest = fmaxf(largest, fabsf(v[j]));
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
    }
    const int top = p.planes == 1 ? 7 : 119;
    const float exact = largest / static_cast<float>(top);
    const float scale = p.bf16_scales ? to_float(from_float<__nv_bfloat16>(exact))
                                      : to_float(from_float<__half>(exact));
    for (int j = 0; j < 4; ++j) {
      const float steps = scale > 0 ? rintf(v[j] / scale) : 0;
      level[i][j * 32 + lane] = static_cast<int8_t>(
          fminf(fmaxf(steps, static_cast<float>(-top)), static_cast<float>(top)));
    }
    if (lane < p.planes) {
      const float plane_scale = lane < p.planes - 1 ? 16 * scale : scale;
      uint16_t* scales = reinterpret_cast<uint16_t*>(block_of(lane) + kScaleOffset);
      const __half half = from_float<__half>(plane_scale);
      const __nv_bfloat16 bf16 = from_float<__nv_bfloat16>(plane_scale);
      scales[first + i] = p.bf16_scales ? *reinterpret_cast<const uint16_t*>(&bf16)
                                        : *reinterpret_cast<const uint16_t*>(&half);
    }
  }
  __syncthreads();
  // The 16 rows have 256 of their warp tile's 512 words: every second one.
  const int tile = first / 16 % 2, word = first / kWarpTileRows * 512 + threadIdx.x * 2 + tile;
  for (int plane = 0; plane < p.planes; ++plane) {
    uint32_t bits = 0;
    for (int i = 0; i < 8; ++i) {
      const Place at = place_of(word, i);
      const int value = level[at.row - first][at.k], high = (value + 8) >> 4;
      const int q = p.planes == 1 ? value : plane == 0 ? high : value - 16 * high;
      bits |= static_cast<uint32_t>(q + 8) << (4 * i);
    }
    reinterpret_cast<uint32_t*>(block_of(plane))[word] = bits;
  }
}

struct DequantizeArgs {
  void* out;  // [rows, K]
  const char* blocks;
  int first_row, rows, k, k_blocks, planes;
  int64_t block_bytes;
  bool zero_points, bf16_scales;
};

// Transposes a quad: each lane has a word of four 16-byte chunks; afterwards lane q has chunk q.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool upper = (threadIdx.x & mask) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & mask) != 0) continue;
      // Exchange words i of upper lanes with words i + mask of lower lanes.
      const uint32_t given = upper ? v[i] : v[i + mask];
      const uint32_t taken = __shfl_xor_sync(0xffffffffu, given, mask);
      (upper ? v[i] : v[i + mask]) = taken;
    }
  }
}

// A warp dequantises a warp tile of a k block. It reads the fragments of its lanes, 512 bytes at a
// time. The lanes of a quad exchange 64 bytes of a row until each has 16 contiguous bytes.
// blockIdx.x along K, blockIdx.y along N.
template <typename T, bool kTwoPlanes, int kGroups>
__global__ void __launch_bounds__(kThreads)
    packed_dequantize_kernel(const __grid_constant__ DequantizeArgs p) {
  ptx::pdl_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  static_assert(kThreads == 32 * kWarpTiles, "a warp for each warp tile");
  const int warp_tile =
      p.first_row / kWarpTileRows + static_cast<int>(blockIdx.y) * kWarpTiles + warp;
  if (warp_tile * kWarpTileRows >= p.first_row + p.rows) {
    ptx::pdl_wait();
    return;
  }
  const auto block_of = [&](int plane) {
    const int k_block = plane * (p.k_blocks / p.planes) + static_cast<int>(blockIdx.x);
    return p.blocks + (int64_t{warp_tile / kWarpTiles} * p.k_blocks + k_block) * p.block_bytes;
  };
  const char* block = block_of(p.planes - 1);
  const int at = warp_tile % kWarpTiles * kWarpTileBytes + lane * 16;
  uint4 words[4], high_words[4];  // nibbles of two k steps each
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    words[pair] = *reinterpret_cast<const uint4*>(block + at + pair * kPairBytes);
    if constexpr (kTwoPlanes) {
      high_words[pair] = *reinterpret_cast<const uint4*>(block_of(0) + at + pair * kPairBytes);
    }
  }
  float scales[kGroups][4];  // scales of rows g, g + 8, g + 16 and g + 24
  int zeros[kGroups][4];
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) {
    const int row = warp_tile % kWarpTiles * kWarpTileRows + i % 4 * 8 + g, group = i / 4;
    const int at = row * kGroups + group;
    const uint16_t* stored = reinterpret_cast<const uint16_t*>(block + kScaleOffset) + at;
    scales[group][i % 4] = p.bf16_scales ? to_float(*reinterpret_cast<const __nv_bfloat16*>(stored))
                                         : to_float(*reinterpret_cast<const __half*>(stored));
    zeros[group][i % 4] =
        p.zero_points ? static_cast<uint8_t>(block[zero_offset(kGroups) + at]) : 8;
  }
  ptx::pdl_wait();  // earlier kernels may still read `out`
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const int k = static_cast<int>(blockIdx.x) * kPackedK + pair * 32 + q * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t chunks[4];  // this lane's two k of each chunk
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // chunk c: step c / 2 of the pair, k half c % 2
        const int shift = 4 * (i % 2 + 2 * (c % 2)), group = (2 * pair + c / 2) * kGroups / 8;
        float value[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          int level =
              static_cast<int>(word_of(words[pair], c / 2, i / 2) >> (shift + 16 * odd) & 15) -
              zeros[group][i];
          if constexpr (kTwoPlanes) {
            const uint32_t high = word_of(high_words[pair], c / 2, i / 2);
            level += 16 * (static_cast<int>(high >> (shift + 16 * odd) & 15) - 8);
          }
          value[odd] = static_cast<float>(level) * scales[group][i];
        }
        chunks[c] = pack2<T>(value[0], value[1]);
      }
      transpose_quad(chunks);
      const int row = warp_tile * kWarpTileRows + i * 8 + g - p.first_row;
      if (row < 0 || row >= p.rows || k >= p.k) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + int64_t{row} * p.k + k) =
          make_uint4(chunks[0], chunks[1], chunks[2], chunks[3]);
    }
  }
}

}  // namespace

// ---- launchers

void int4_pack(const Context& ctx, const Int4PackParams& params) {
  check_int4_pack(params);
  const PackedWeight& w = params.w;
  const bool last_rows = params.first_row + params.n == w.n;
  const int64_t end_row = last_rows ? w.row_blocks() * kPackedRows : params.first_row + params.n;
  // The rows of a part of a gated W lie in all row blocks.
  const int64_t first_row_block = w.gated ? 0 : params.first_row / kPackedRows;
  const int64_t end_row_block =
      w.gated ? w.row_blocks() : (end_row + kPackedRows - 1) / kPackedRows;
  const int64_t groups = params.scales.size(params.format == Int4Format::kCompressed ? 1 : 0);
  const PackArgs args{.blocks = static_cast<char*>(w.blocks),
                      .q = params.q.as<uint32_t>(),
                      .scales = params.scales.as<uint16_t>(),
                      .zeros = params.zeros.as<uint32_t>(),
                      .format = params.format,
                      .words = static_cast<int>(params.q.size(1)),
                      .groups = static_cast<int>(groups),
                      .k_per_scale = static_cast<int>(params.k_per_scale),
                      .block_groups = w.layout.groups(),
                      .by_channel = groups == 1 && params.k > kPackedK,
                      .n = static_cast<int>(params.n),
                      .k = static_cast<int>(params.k),
                      .gated_rows = w.gated ? static_cast<int>(w.n) : 0,
                      .first_row_block = static_cast<int>(first_row_block),
                      .first_row = static_cast<int>(params.first_row),
                      .end_row = static_cast<int>(end_row),
                      .first_k_block = static_cast<int>(params.first_k / kPackedK),
                      .k_blocks = static_cast<int>(w.k_blocks()),
                      .block_bytes = w.block_bytes()};
  const int64_t k_blocks = (params.k + kPackedK - 1) / kPackedK;
  launch(
      ctx, int4_pack_kernel,
      dim3(static_cast<unsigned>(k_blocks), static_cast<unsigned>(end_row_block - first_row_block)),
      dim3(kThreads), 0, args);
}

void packed_quantize(const Context& ctx, const PackedQuantizeParams& params) {
  check_packed_quantize(params);
  const PackedWeight& w = params.w;
  const QuantizeArgs args{.blocks = static_cast<char*>(w.blocks),
                          .x = params.x.data(),
                          .index = params.index,
                          .n = static_cast<int>(w.n),
                          .k = static_cast<int>(w.k),
                          .k_blocks = static_cast<int>(w.k_blocks()),
                          .planes = w.layout.planes,
                          .block_bytes = w.block_bytes(),
                          .bf16_scales = w.layout.scale_dtype == DType::kBF16,
                          .gated = w.gated};
  const dim3 grid(static_cast<unsigned>(w.k_blocks() / w.layout.planes),
                  static_cast<unsigned>(w.row_blocks() * (kPackedRows / 16)));
  dispatch_half(params.x.dtype(), [&](auto t) {
    launch(ctx, packed_quantize_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

void packed_dequantize(const Context& ctx, const PackedDequantizeParams& params) {
  check_packed_dequantize(params);
  if (params.w.layout.codes != Codes::kInt4) return dequantize_numbers(ctx, params);
  const PackedWeight& w = params.w;
  const int64_t rows = params.out.size(0);
  const DequantizeArgs args{.out = params.out.data(),
                            .blocks = static_cast<const char*>(w.blocks),
                            .first_row = static_cast<int>(params.first_row),
                            .rows = static_cast<int>(rows),
                            .k = static_cast<int>(w.k),
                            .k_blocks = static_cast<int>(w.k_blocks()),
                            .planes = w.layout.planes,
                            .block_bytes = w.block_bytes(),
                            .zero_points = w.layout.zero_points,
                            .bf16_scales = w.layout.scale_dtype == DType::kBF16};
  const int64_t warp_tiles = (params.first_row + rows + kWarpTileRows - 1) / kWarpTileRows -
                             params.first_row / kWarpTileRows;
  const dim3 grid(static_cast<unsigned>(w.k_blocks() / w.layout.planes),
                  static_cast<unsigned>((warp_tiles + kWarpTiles - 1) / kWarpTiles));
  dispatch_half(params.out.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx,
           w.layout.planes == 2   ? packed_dequantize_kernel<T, true, 1>
           : w.layout.group == 0  ? packed_dequantize_kernel<T, false, 1>
           : w.layout.group == 32 ? packed_dequantize_kernel<T, false, 4>
                                  : packed_dequantize_kernel<T, false, 8>,
           grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
