// float_group_pack and dequantize_float_groups: rows of float codes with group scales to weight
// blocks, and weight blocks to rows.
//
// Roofline: bytes read plus bytes written. Packing runs at load; dequantisation serves prefill on
// GPUs without a kernel for many rows: 2 bytes written for half a byte or a byte read.
//
// Schedule: a CTA has a weight block. First a thread has the scales of a row, and eight lanes
// exchange their largest. Then a thread writes one word of codes after another.
//
// The surprising decision: a word gathers its codes one by one, from L1, as in int4_pack.
#include "kernels/gemm/packed/float_group_pack.h"

#include <cmath>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/block.cuh"
#include "kernels/gemm/packed/float_group_pack.cuh"
#include "kernels/gemm/packed/group_scale.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = kPackedRows;
constexpr int kSharedRows = 8;  // rows that share a float32 scale
constexpr int kMaxGroups = 8;   // of a row of a block

struct PackArgs {
  char* blocks;
  const uint8_t* codes;
  const uint8_t* scales;   // [n, k / group]
  const float* factor;     // null: 1
  int n, k, rows;          // rows of W; of the part
  int first_row, end_row;  // rows to write, in the checkpoint's order
  int group, most;
  bool gated, interleaved, divides, powers;
  int64_t code_bytes, block_bytes;
};

// The place of code `i` of word `word`: the inverse of nibble_place and byte_place.
struct Place {
  int row, k;
};
template <int kBits>
__device__ __forceinline__ Place place_of(int word, int i) {
  const int lane = word / 4 % 32;
  if constexpr (kBits == 4) {
    const int row = word / 512 * kWarpTileRows + word % 2 * 16 + i % 2 * 8 + lane / 4;
    const int step = word / 128 % 4 * 2 + word / 2 % 2;
    return {row, 16 * step + i / 2 % 2 * 8 + lane % 4 * 2 + i / 4};
  } else {
    const int row = word / 1024 * kWarpTileRows + word / 2 % 2 * 16 + word % 2 * 8 + lane / 4;
    return {row, word / 128 % 8 * 16 + lane % 4 * 2 + i / 2 + (1 - i % 2) * 8};
  }
}

// ---- kernels

// Packs a weight block; blockIdx.x along K, blockIdx.y along N.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
    float_group_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  __shared__ uint8_t group_scales[kPackedRows][kMaxGroups];
  const int row0 = blockIdx.y * kPackedRows, k0 = blockIdx.x * kPackedK;
  char* block = p.blocks + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * p.block_bytes;
  // The row of the part that is stored as row `row`; -1: padding; -2: of another part.
  const auto own_row = [&](int row) {
    const int source = p.gated ? static_cast<int>(gated_row(p.n, row)) : row;
    if (source < p.first_row || source >= p.end_row) return -2;
    if (source >= p.first_row + p.rows) return -1;
    return static_cast<int>(part_row(source, p.first_row, p.interleaved, p.n));
  };

  const int own = own_row(row0 + static_cast<int>(threadIdx.x));
  const int groups = kPackedK / p.group, all_groups = p.k / p.group, first = k0 / p.group;
  const auto stored = [&](int i) -> int {  // padding has scale 0
    return own >= 0 && first + i < all_groups ? p.scales[int64_t{own} * all_groups + first + i] : 0;
  };
  int largest = 0;
  for (int i = 0; i < groups; ++i) largest = max(largest, stored(i));
  for (int mask = 1; mask < kSharedRows; mask *= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  }
  for (int i = 0; i < groups; ++i) {
    group_scales[threadIdx.x][i] = p.powers ? group_scale_of_e8m0(stored(i), largest, p.most)
                                            : group_scale_of_e4m3(static_cast<uint8_t>(stored(i)));
  }
  if (own != -2) {
    char* extra = block + p.code_bytes;
    if (threadIdx.x % kSharedRows == 0) {
      float factor = p.factor == nullptr ? 1 : *p.factor;
      if (p.divides) factor = 1 / factor;
      if (p.powers) factor *= scale_of_e8m0(largest);
      reinterpret_cast<float*>(extra)[threadIdx.x / kSharedRows] = own < 0 ? 0 : factor;
    }
    char* to = extra + 4 * kPackedRows / kSharedRows + threadIdx.x * groups;
    for (int i = 0; i < groups; ++i) to[i] = static_cast<char>(group_scales[threadIdx.x][i]);
  }
  __syncthreads();

  // With 4 bits, a word may hold rows of two parts: keep the other's bits.
  constexpr int kCodes = 32 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t* words = reinterpret_cast<uint32_t*>(block);
  for (int word = threadIdx.x; word < p.code_bytes / 4; word += kThreads) {
    uint32_t bits = 0, mask = 0;
    for (int i = 0; i < kCodes; ++i) {
      const Place at = place_of<kBits>(word, i);
      const int row = own_row(row0 + at.row), k = k0 + at.k;
      if (row == -2) continue;
      mask |= kMask << (kBits * i);
      if (row < 0 || k >= p.k || group_scales[at.row][at.k / p.group] == 0) continue;
      const int64_t place = int64_t{row} * p.k + k;
      const uint32_t code =
          kBits == 8 ? p.codes[place] : p.codes[place / 2] >> (4 * (place % 2)) & 15;
      bits |= code << (kBits * i);
    }
    if (mask != 0) words[word] = mask == 0xFFFFFFFF ? bits : (words[word] & ~mask) | bits;
  }
}

struct DequantizeArgs {
  void* out;  // [rows, k]
  const char* blocks;
  int first_row, rows, k, group;
  int64_t code_bytes, block_bytes;
};

__device__ __forceinline__ float from_e2m1(uint32_t code) {
  // The bits of e2m1 in a float32 number are 2^-126 times as large, also of subnormal codes.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

// Dequantises a weight block; blockIdx.x along K, blockIdx.y along the rows' blocks.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_float_groups_kernel(const __grid_constant__ DequantizeArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();  // earlier kernels may still read `out`
  const int row_block = p.first_row / kPackedRows + blockIdx.y;
  const char* block = p.blocks + (int64_t{row_block} * gridDim.x + blockIdx.x) * p.block_bytes;
  const float* scales = reinterpret_cast<const float*>(block + p.code_bytes);
  const auto* group_scales = reinterpret_cast<const uint8_t*>(scales + kPackedRows / kSharedRows);
  for (int word = threadIdx.x; word < p.code_bytes / 4; word += kThreads) {
    const uint32_t codes = reinterpret_cast<const uint32_t*>(block)[word];
    for (int i = 0; i < 32 / kBits; ++i) {
      const Place at = place_of<kBits>(word, i);
      const int row = row_block * kPackedRows + at.row - p.first_row;
      const int k = static_cast<int>(blockIdx.x) * kPackedK + at.k;
      if (row < 0 || row >= p.rows || k >= p.k) continue;
      const uint32_t code = codes >> (kBits * i);
      const float number = kBits == 8 ? from_e4m3(static_cast<uint8_t>(code)) : from_e2m1(code);
      const float group = group_scale_value(group_scales[(at.row * kPackedK + at.k) / p.group]);
      static_cast<T*>(p.out)[int64_t{row} * p.k + k] =
          from_float<T>(number * group * scales[at.row / kSharedRows]);
    }
  }
}

}  // namespace

// ---- launchers

void float_group_pack(const Context& ctx, const FloatGroupPackParams& params) {
  check_float_group_pack(params);
  const PackedWeight& w = params.w;
  const int64_t n = params.codes.size(0), end_row = params.first_row + n;
  const PackArgs args{
      .blocks = static_cast<char*>(w.blocks),
      .codes = params.codes.as<uint8_t>(),
      .scales = params.scales.as<uint8_t>(),
      .factor = params.factor.empty() ? nullptr : params.factor.as<float>(),
      .n = static_cast<int>(w.n),
      .k = static_cast<int>(w.k),
      .rows = static_cast<int>(n),
      .first_row = static_cast<int>(params.first_row),
      .end_row = static_cast<int>(end_row == w.n ? w.row_blocks() * kPackedRows : end_row),
      .group = w.layout.group,
      .most = most_exponents(w.layout.codes),
      .gated = w.gated,
      .interleaved = params.interleaved,
      .divides = params.divides,
      .powers = params.powers,
      .code_bytes = w.layout.code_bytes(),
      .block_bytes = w.block_bytes()};
  launch(ctx, w.layout.bits() == 4 ? float_group_pack_kernel<4> : float_group_pack_kernel<8>,
         dim3(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(w.row_blocks())),
         dim3(kThreads), 0, args);
}

void dequantize_float_groups(const Context& ctx, const PackedDequantizeParams& params) {
  const PackedWeight& w = params.w;
  const int64_t rows = params.out.size(0), last = params.first_row + rows - 1;
  if (rows == 0) return;
  const DequantizeArgs args{.out = params.out.data(),
                            .blocks = static_cast<const char*>(w.blocks),
                            .first_row = static_cast<int>(params.first_row),
                            .rows = static_cast<int>(rows),
                            .k = static_cast<int>(w.k),
                            .group = w.layout.group,
                            .code_bytes = w.layout.code_bytes(),
                            .block_bytes = w.block_bytes()};
  const int64_t row_blocks = last / kPackedRows - params.first_row / kPackedRows + 1;
  const dim3 grid(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(row_blocks));
  dispatch_half(params.out.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx,
           w.layout.bits() == 4 ? dequantize_float_groups_kernel<T, 4>
                                : dequantize_float_groups_kernel<T, 8>,
           grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
