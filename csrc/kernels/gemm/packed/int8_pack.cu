// int8_pack: rows of 8-bit integers to weight blocks.
//
// Roofline: bytes read plus bytes written, at load.
//
// Schedule: a CTA packs a weight block. A thread writes one word of codes after another, then
// scales and zero points.
//
// The surprising decision: bytes of all forms are gathered one by one, through L1. So each form
// takes one expression.
#include "kernels/gemm/packed/int8_pack.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/gemm/packed/part_rows.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256, kCodes = kPackedRows * kPackedK;
constexpr uint8_t kZero = 128;

struct PackArgs {
  PartRows part;
  const uint8_t* codes;
  const uint16_t* scales;
  const uint8_t* zeros;  // zero points; null: all are 128
  int k, zero_offset;
  int groups, block_groups;  // number of scales of a row: in the file, and in a weight block
  int64_t k_per_scale;
  bool words, is_signed, one_scale;

  // The place of the scale of row `own` at k. Zero points have the order of the scales. In other
  // formats than GPTQ's, a word holds four rows.
  __device__ __forceinline__ int64_t scale_place(int own, int k) const {
    const int64_t group = k / k_per_scale, row = one_scale ? 0 : own;
    return words ? group * part.rows + row : row * groups + group;
  }
  __device__ __forceinline__ uint8_t zero_of(int own, int k) const {
    const int64_t group = k / k_per_scale;
    const int64_t at = words ? group * part.rows + own : (own / 4 * groups + group) * 4 + own % 4;
    return static_cast<uint8_t>(zeros[at] + zero_offset);
  }
};

// ---- kernels

// Packs a weight block.
__global__ void __launch_bounds__(kThreads) int8_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int k0 = blockIdx.x * kPackedK;
  char* block = p.part.block();
  write_codes<8>(p.part, block, [&](int own, Place at) -> uint8_t {
    const int k = k0 + at.k;
    if (own < 0 || k >= p.k) return kZero;
    const int64_t place =
        p.words ? (int64_t{k / 4} * p.part.rows + own) * 4 + k % 4 : int64_t{own} * p.k + k;
    return p.is_signed ? p.codes[place] ^ kZero : p.codes[place];
  });
  const int num_scales = kPackedRows * p.block_groups;
  char* zeros = block + kCodes + 2 * num_scales;
  for (int i = threadIdx.x; i < num_scales; i += kThreads) {
    const int own = p.part.own(i / p.block_groups);
    const int k = k0 + i % p.block_groups * (kPackedK / p.block_groups);
    if (own == -2) continue;
    const bool inside = own >= 0 && k < p.k;
    reinterpret_cast<uint16_t*>(block + kCodes)[i] =
        inside ? p.scales[p.scale_place(own, k)] : uint16_t{0};
    if (p.zeros == nullptr) continue;
    zeros[i] = static_cast<char>(inside ? p.zero_of(own, k) : kZero);
  }
}

}  // namespace

// ---- launchers

void int8_pack(const Context& ctx, const Int8PackParams& params) {
  check_int8_pack(params);
  const PackedWeight& w = params.w;
  const bool words = params.codes.dtype() == DType::kI32;
  const PackArgs args{.part = part_rows(w, params.first_row, params.codes.size(words ? 1 : 0)),
                      .codes = params.codes.as<uint8_t>(),
                      .scales = params.scales.as<uint16_t>(),
                      .zeros = w.layout.zero_points ? params.zeros.as<uint8_t>() : nullptr,
                      .k = static_cast<int>(w.k),
                      .zero_offset = params.zero_offset,
                      .groups = static_cast<int>(params.scales.size(words ? 0 : 1)),
                      .block_groups = w.layout.groups(),
                      .k_per_scale = params.k_per_scale,
                      .words = words,
                      .is_signed = params.codes.dtype() == DType::kI8,
                      .one_scale = !words && params.scales.size(0) == 1};
  launch(ctx, int8_pack_kernel, grid_of_blocks(w), dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
