// float_group_pack: rows of float codes with group scales to weight blocks.
//
// Roofline: bytes read plus bytes written, at load.
//
// Schedule: a CTA has a weight block. First each thread reads the scales of a row, and eight lanes
// find the largest of their scales. Then each thread writes one word of codes after another.
//
// The surprising decision: a word gathers its codes one by one, from L1, as in all packers. Packing
// takes at most a few milliseconds a model, less than the model's transfer over the bus.
#include "kernels/gemm/packed/float_group_pack.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/gemm/packed/group_scale.h"
#include "kernels/gemm/packed/part_rows.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = kPackedRows;
constexpr int kSharedRows = 8;  // rows of W that share a float32 scale
constexpr int kMaxGroups = 8;   // maximum number of groups in a row of a weight block

struct PackArgs {
  PartRows part;
  const uint8_t* codes;
  const uint8_t* scales;  // [rows, k / group], 1 byte each
  const float* factor;    // multiplies or divides all scales; null: 1
  int k, group, most;
  bool divides, powers;
  int64_t code_bytes;
};

// ---- kernels

// Packs a weight block.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
    float_group_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  __shared__ uint8_t group_scales[kPackedRows][kMaxGroups];
  const int k0 = blockIdx.x * kPackedK;
  char* block = p.part.block();
  const int own = p.part.own(static_cast<int>(threadIdx.x));
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

  write_codes<kBits>(p.part, block, [&](int row, Place at) -> uint32_t {
    const int k = k0 + at.k;
    if (row < 0 || k >= p.k || group_scales[at.row][at.k / p.group] == 0) return 0;
    const int64_t place = int64_t{row} * p.k + k;
    return kBits == 8 ? p.codes[place] : p.codes[place / 2] >> (4 * (place % 2)) & 15;
  });
}

}  // namespace

// ---- launchers

void float_group_pack(const Context& ctx, const FloatGroupPackParams& params) {
  check_float_group_pack(params);
  const PackedWeight& w = params.w;
  const int64_t n = params.codes.size(0);
  const PackArgs args{.part = part_rows(w, params.first_row, n, params.interleaved),
                      .codes = params.codes.as<uint8_t>(),
                      .scales = params.scales.as<uint8_t>(),
                      .factor = params.factor.empty() ? nullptr : params.factor.as<float>(),
                      .k = static_cast<int>(w.k),
                      .group = w.layout.group,
                      .most = most_exponents(w.layout.codes),
                      .divides = params.divides,
                      .powers = params.powers,
                      .code_bytes = w.layout.code_bytes()};
  launch(ctx, w.layout.bits() == 4 ? float_group_pack_kernel<4> : float_group_pack_kernel<8>,
         grid_of_blocks(w), dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
