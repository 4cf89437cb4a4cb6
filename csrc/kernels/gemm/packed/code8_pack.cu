// code8_pack: rows of 8-bit codes to weight blocks.
//
// Roofline: bytes read plus bytes written, at load.
//
// Schedule: a CTA packs a weight block. A thread writes one word of codes after another.
//
// The surprising decision: a word gathers its codes one by one, from L1. Packing takes at most a
// few milliseconds a model, less than the model's transfer over the bus.
#include "kernels/gemm/packed/code8_pack.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/gemm/packed/part_rows.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = kPackedRows;

struct PackArgs {
  PartRows part;
  const uint8_t* codes;  // [rows, k], 1 byte each
  const float* scales;
  int k, rows_per_scale, scale_columns, scale_rows;
  int64_t k_per_scale;
};

// ---- kernels

// Packs a weight block.
__global__ void __launch_bounds__(kThreads) code8_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int k0 = blockIdx.x * kPackedK;
  char* block = p.part.block();
  write_codes<8>(p.part, block, [&](int row, Place at) -> uint8_t {
    const int k = k0 + at.k;
    return row >= 0 && k < p.k ? p.codes[int64_t{row} * p.k + k] : uint8_t{0};
  });
  const int row = p.part.own(static_cast<int>(threadIdx.x));
  if (row == -2 || threadIdx.x % p.scale_rows != 0) return;
  const int64_t at = int64_t{row / p.rows_per_scale} * p.scale_columns + k0 / p.k_per_scale;
  reinterpret_cast<float*>(block + kPackedRows * kPackedK)[threadIdx.x / p.scale_rows] =
      row >= 0 ? p.scales[at] : 0;
}

}  // namespace

// ---- launchers

void code8_pack(const Context& ctx, const Code8PackParams& params) {
  check_code8_pack(params);
  const PackedWeight& w = params.w;
  const PackArgs args{.part = part_rows(w, params.first_row, params.codes.size(0)),
                      .codes = params.codes.as<uint8_t>(),
                      .scales = params.scales.as<float>(),
                      .k = static_cast<int>(w.k),
                      .rows_per_scale = static_cast<int>(params.rows_per_scale),
                      .scale_columns = static_cast<int>(params.scales.size(1)),
                      .scale_rows = w.layout.scale_rows,
                      .k_per_scale = params.k_per_scale};
  launch(ctx, code8_pack_kernel, grid_of_blocks(w), dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
