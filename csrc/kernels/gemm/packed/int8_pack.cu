// int8_pack and dequantize_int8: rows of 8-bit integers to weight blocks, and weight blocks to
// rows.
//
// Roofline: bytes read plus bytes written. Packing runs at load; dequantisation serves prefill on
// GPUs without a kernel for many rows: 2 bytes written for each byte read.
//
// Schedule: a CTA has a weight block, a thread one byte after another.
//
// The surprising decision: bytes are gathered and scattered one by one, through L1, as in
// code8_pack.
#include "kernels/gemm/packed/int8_pack.h"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/int8_pack.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256, kCodes = kPackedRows * kPackedK;
constexpr int kZero = 128;

struct PackArgs {
  char* blocks;
  const uint8_t* codes;
  const uint16_t* scales;
  int n, k, first_row, end_row;  // of the part; rows to write, in the checkpoint's order
  int gated_rows;                // N of a gated W, else 0
  int groups, block_groups;      // scales of a row: in the file, in a block
  int64_t k_per_scale, block_bytes;
  bool words, is_signed, one_scale;
};

// ---- kernels

// Packs a weight block; blockIdx.x along K, blockIdx.y along N.
__global__ void __launch_bounds__(kThreads) int8_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row0 = blockIdx.y * kPackedRows, k0 = blockIdx.x * kPackedK;
  char* block = p.blocks + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * p.block_bytes;
  // The row of the part that is stored as row `row`; -1: of another part.
  const auto own_row = [&](int row) {
    const int source = p.gated_rows > 0 ? static_cast<int>(gated_row(p.gated_rows, row)) : row;
    return source >= p.first_row && source < p.end_row ? source - p.first_row : -1;
  };
  for (int i = threadIdx.x; i < kCodes; i += kThreads) {
    const int row = i / kPackedK, k = k0 + i % kPackedK, own = own_row(row0 + row);
    if (own < 0) continue;
    uint8_t code = kZero;
    if (own < p.n && k < p.k) {
      const int64_t at =
          p.words ? (int64_t{k / 4} * p.n + own) * 4 + k % 4 : int64_t{own} * p.k + k;
      code = static_cast<uint8_t>(p.is_signed ? p.codes[at] ^ kZero : p.codes[at]);
    }
    block[byte_place(row, i % kPackedK)] = static_cast<char>(code);
  }
  for (int i = threadIdx.x; i < kPackedRows * p.block_groups; i += kThreads) {
    const int own = own_row(row0 + i / p.block_groups);
    const int k = k0 + i % p.block_groups * (kPackedK / p.block_groups);
    if (own < 0) continue;
    uint16_t scale = 0;
    if (own < p.n && k < p.k) {
      const int64_t group = k / p.k_per_scale, row = p.one_scale ? 0 : own;
      scale = p.scales[p.words ? group * p.n + row : row * p.groups + group];
    }
    reinterpret_cast<uint16_t*>(block + kCodes)[i] = scale;
  }
}

struct DequantizeArgs {
  void* out;  // [rows, k]
  const char* blocks;
  int first_row, rows, k, block_groups;
  int64_t block_bytes;
  bool bf16_scales;
};

// Dequantises a weight block; blockIdx.x along K, blockIdx.y along the rows' blocks.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_int8_kernel(const __grid_constant__ DequantizeArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();  // earlier kernels may still read `out`
  const int row_block = p.first_row / kPackedRows + blockIdx.y;
  const char* block = p.blocks + (int64_t{row_block} * gridDim.x + blockIdx.x) * p.block_bytes;
  for (int i = threadIdx.x; i < kCodes; i += kThreads) {
    const int in_block = i / kPackedK, row = row_block * kPackedRows + in_block - p.first_row;
    const int k = static_cast<int>(blockIdx.x) * kPackedK + i % kPackedK;
    if (row < 0 || row >= p.rows || k >= p.k) continue;
    const int group = i % kPackedK * p.block_groups / kPackedK;
    const void* stored = block + kCodes + 2 * (in_block * p.block_groups + group);
    const float scale = p.bf16_scales ? to_float(*static_cast<const __nv_bfloat16*>(stored))
                                      : to_float(*static_cast<const __half*>(stored));
    const int q = static_cast<uint8_t>(block[byte_place(in_block, i % kPackedK)]);
    static_cast<T*>(p.out)[int64_t{row} * p.k + k] =
        from_float<T>(static_cast<float>(q - kZero) * scale);
  }
}

}  // namespace

// ---- launchers

void int8_pack(const Context& ctx, const Int8PackParams& params) {
  check_int8_pack(params);
  const PackedWeight& w = params.w;
  const bool words = params.codes.dtype() == DType::kI32;
  const int64_t n = params.codes.size(words ? 1 : 0), end_row = params.first_row + n;
  const PackArgs args{
      .blocks = static_cast<char*>(w.blocks),
      .codes = params.codes.as<uint8_t>(),
      .scales = params.scales.as<uint16_t>(),
      .n = static_cast<int>(n),
      .k = static_cast<int>(w.k),
      .first_row = static_cast<int>(params.first_row),
      .end_row = static_cast<int>(end_row == w.n ? w.row_blocks() * kPackedRows : end_row),
      .gated_rows = w.gated ? static_cast<int>(w.n) : 0,
      .groups = static_cast<int>(params.scales.size(words ? 0 : 1)),
      .block_groups = w.layout.groups(),
      .k_per_scale = params.k_per_scale,
      .block_bytes = w.block_bytes(),
      .words = words,
      .is_signed = params.codes.dtype() == DType::kI8,
      .one_scale = !words && params.scales.size(0) == 1};
  launch(ctx, int8_pack_kernel,
         dim3(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(w.row_blocks())),
         dim3(kThreads), 0, args);
}

void dequantize_int8(const Context& ctx, const PackedDequantizeParams& params) {
  const PackedWeight& w = params.w;
  const int64_t rows = params.out.size(0), last = params.first_row + rows - 1;
  if (rows == 0) return;
  const DequantizeArgs args{.out = params.out.data(),
                            .blocks = static_cast<const char*>(w.blocks),
                            .first_row = static_cast<int>(params.first_row),
                            .rows = static_cast<int>(rows),
                            .k = static_cast<int>(w.k),
                            .block_groups = w.layout.groups(),
                            .block_bytes = w.block_bytes(),
                            .bf16_scales = w.layout.scale_dtype == DType::kBF16};
  const int64_t row_blocks = last / kPackedRows - params.first_row / kPackedRows + 1;
  const dim3 grid(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(row_blocks));
  dispatch_half(params.out.dtype(), [&](auto t) {
    launch(ctx, dequantize_int8_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
