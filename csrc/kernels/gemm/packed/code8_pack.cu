// code8_pack and dequantize_e4m3: rows of 8-bit codes to weight blocks, and weight blocks to rows.
//
// Roofline: bytes read plus bytes written. Packing runs at load; dequantisation serves prefill on
// GPUs without a kernel for many rows: 2 bytes written for each byte read.
//
// Schedule: a CTA has a weight block, a thread 32 of its words. The four codes of a word belong to
// one row (byte_place), so parts of a stacked W never share a word.
//
// The surprising decision: a word gathers its codes one by one, from L1. It is at most a few
// milliseconds a model, less than its transfer over the bus.
#include "kernels/gemm/packed/code8_pack.h"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/code8_pack.cuh"
#include "kernels/layer/fp8_row.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = kPackedRows * kPackedK / 4;

// The row and the first k of a word of a block. Its bytes have k + 8, k, k + 9, k + 1.
struct Place {
  int row, k;

  __device__ __forceinline__ explicit Place(int word)
      : row(word / 1024 * 32 + word / 2 % 2 * 16 + word % 2 * 8 + word / 4 % 32 / 4),
        k(word / 128 % 8 * 16 + word / 4 % 4 * 2) {}
};

struct PackArgs {
  char* blocks;
  const uint8_t* codes;  // [n, k]
  const float* scales;
  int n, k, first_row, end_row;  // rows to write: [first_row, end_row) in the checkpoint's order
  int gated_rows;                // N of a gated W, else 0
  int rows_per_scale, scale_columns, scale_rows;
  int64_t k_per_scale, block_bytes;
};

// ---- kernels

// Packs a weight block; blockIdx.x along K, blockIdx.y along N.
__global__ void __launch_bounds__(kThreads) code8_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row0 = blockIdx.y * kPackedRows, k0 = blockIdx.x * kPackedK;
  char* block = p.blocks + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * p.block_bytes;
  // The row of the part that is stored as row `row`; -1: of another part.
  const auto own_row = [&](int row) {
    const int source = p.gated_rows > 0 ? static_cast<int>(gated_row(p.gated_rows, row)) : row;
    return source >= p.first_row && source < p.end_row ? source - p.first_row : -1;
  };
  for (int word = threadIdx.x; word < kWords; word += kThreads) {
    const Place at(word);
    const int row = own_row(row0 + at.row), first = k0 + at.k;
    if (row < 0) continue;
    const auto code = [&](int k) -> uint32_t {
      return row < p.n && k < p.k ? p.codes[int64_t{row} * p.k + k] : 0;
    };
    reinterpret_cast<uint32_t*>(block)[word] =
        code(first + 8) | code(first) << 8 | code(first + 9) << 16 | code(first + 1) << 24;
  }
  const int row = own_row(row0 + static_cast<int>(threadIdx.x));
  if (row < 0 || threadIdx.x % p.scale_rows != 0) return;
  const int64_t at = int64_t{row / p.rows_per_scale} * p.scale_columns + k0 / p.k_per_scale;
  reinterpret_cast<float*>(block + 4 * kWords)[threadIdx.x / p.scale_rows] =
      row < p.n ? p.scales[at] : 0;
}

struct DequantizeArgs {
  void* out;  // [rows, k]
  const char* blocks;
  int first_row, rows, k, scale_rows;
  int64_t block_bytes;
};

// Dequantises a weight block; blockIdx.x along K, blockIdx.y along the rows' blocks.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_e4m3_kernel(const __grid_constant__ DequantizeArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();  // earlier kernels may still read `out`
  const int row_block = p.first_row / kPackedRows + blockIdx.y;
  const char* block = p.blocks + (int64_t{row_block} * gridDim.x + blockIdx.x) * p.block_bytes;
  const float* scales = reinterpret_cast<const float*>(block + 4 * kWords);
  for (int word = threadIdx.x; word < kWords; word += kThreads) {
    const Place at(word);
    const int row = row_block * kPackedRows + at.row - p.first_row;
    const int k = static_cast<int>(blockIdx.x) * kPackedK + at.k;
    if (row < 0 || row >= p.rows || k >= p.k) continue;
    const uint32_t codes = reinterpret_cast<const uint32_t*>(block)[word];
    const float scale = scales[at.row / p.scale_rows];
    const auto number = [&](int shift) {
      return from_e4m3(static_cast<uint8_t>(codes >> shift)) * scale;
    };
    T* out = static_cast<T*>(p.out) + int64_t{row} * p.k + k;  // k and K are even
    *reinterpret_cast<uint32_t*>(out) = pack2<T>(number(8), number(24));
    if (k + 8 < p.k) *reinterpret_cast<uint32_t*>(out + 8) = pack2<T>(number(0), number(16));
  }
}

}  // namespace

// ---- launchers

void code8_pack(const Context& ctx, const Code8PackParams& params) {
  check_code8_pack(params);
  const PackedWeight& w = params.w;
  const int64_t n = params.codes.size(0), end_row = params.first_row + n;
  const PackArgs args{
      .blocks = static_cast<char*>(w.blocks),
      .codes = params.codes.as<uint8_t>(),
      .scales = params.scales.as<float>(),
      .n = static_cast<int>(n),
      .k = static_cast<int>(w.k),
      .first_row = static_cast<int>(params.first_row),
      .end_row = static_cast<int>(end_row == w.n ? w.row_blocks() * kPackedRows : end_row),
      .gated_rows = w.gated ? static_cast<int>(w.n) : 0,
      .rows_per_scale = static_cast<int>(params.rows_per_scale),
      .scale_columns = static_cast<int>(params.scales.size(1)),
      .scale_rows = w.layout.scale_rows,
      .k_per_scale = params.k_per_scale,
      .block_bytes = w.block_bytes()};
  launch(ctx, code8_pack_kernel,
         dim3(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(w.row_blocks())),
         dim3(kThreads), 0, args);
}

void dequantize_e4m3(const Context& ctx, const PackedDequantizeParams& params) {
  const PackedWeight& w = params.w;
  const int64_t rows = params.out.size(0), last = params.first_row + rows - 1;
  CHECK(w.k % 2 == 0, "packed_dequantize: K is {}, expected an even number", w.k);
  if (rows == 0) return;
  const DequantizeArgs args{.out = params.out.data(),
                            .blocks = static_cast<const char*>(w.blocks),
                            .first_row = static_cast<int>(params.first_row),
                            .rows = static_cast<int>(rows),
                            .k = static_cast<int>(w.k),
                            .scale_rows = w.layout.scale_rows,
                            .block_bytes = w.block_bytes()};
  const int64_t row_blocks = last / kPackedRows - params.first_row / kPackedRows + 1;
  const dim3 grid(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(row_blocks));
  dispatch_half(params.out.dtype(), [&](auto t) {
    launch(ctx, dequantize_e4m3_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
