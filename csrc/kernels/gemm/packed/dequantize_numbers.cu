// dequantize_numbers: weight blocks to rows, for all layouts but int4 (packed_pack.cu has int4).
//
// Roofline: 2 bytes written for each byte or half byte read. It serves prefill on GPUs without a
// kernel for many rows.
//
// Schedule: a CTA has a weight block, and a thread one number after another; neighbours write
// neighbouring k.
//
// The surprising decision: the layout is read at run time, for each number. A kernel for each
// layout would take more time to compile than it saves.
#include "kernels/gemm/packed/dequantize_numbers.cuh"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/group_scale.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

struct DequantizeArgs {
  void* out;  // [rows, k]
  const char* blocks;
  int first_row, rows, k;
  PackedLayout layout;
  int64_t code_bytes, block_bytes;
  int groups, record_bytes;
};

__device__ __forceinline__ float half_at(const char* from) {
  return to_float(*reinterpret_cast<const __half*>(from));
}

__device__ __forceinline__ float from_e2m1(uint32_t code) {
  // The bits of e2m1 in a float32 number are 2^-126 times as large, also of subnormal codes.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

// The number of a row and k of a block, rounded to float32 at most once.
__device__ float number_at(const DequantizeArgs& p, const char* block, int row, int k) {
  const PackedLayout& layout = p.layout;
  const auto* bytes = reinterpret_cast<const uint8_t*>(block);
  const char* extra = block + p.code_bytes;
  uint32_t code;
  if (layout.codes == Codes::kE2m1 || layout.codes == Codes::kK4) {
    const NibblePlace place = nibble_place(row, k);
    code = reinterpret_cast<const uint32_t*>(block)[place.word] >> place.shift & 15;
  } else {
    code = bytes[byte_place(row, k)];
  }
  const int at = row * p.groups + k * p.groups / kPackedK;  // index of the group
  switch (layout.codes) {
    case Codes::kInt8: {
      const char* scale = extra + 2 * at;
      const char* zeros = extra + 2 * kPackedRows * p.groups;
      const int zero = layout.zero_points ? static_cast<uint8_t>(zeros[at]) : 128;
      return static_cast<float>(static_cast<int>(code) - zero) *
             (layout.scale_dtype == DType::kBF16
                  ? to_float(*reinterpret_cast<const __nv_bfloat16*>(scale))
                  : half_at(scale));
    }
    case Codes::kK4:
    case Codes::kK8: {
      const char* record = extra + row * p.record_bytes;
      const int group = k * p.groups / kPackedK;
      const bool is_4 = layout.codes == Codes::kK4;
      const auto number_of = [&](const char* of, bool is_signed) {
        if (layout.halves && is_4) return half_at(of + 2 * group);
        if (layout.halves && *reinterpret_cast<const uint16_t*>(of) == kHalvesTag) {
          return half_at(of + 2 + group / 2 * 2);
        }
        const char byte = of[2 + group];
        const int s = is_signed ? static_cast<int8_t>(byte) : static_cast<uint8_t>(byte);
        return half_at(of) * static_cast<float>(s);
      };
      const float number =
          number_of(record, !is_4) * static_cast<float>(static_cast<int>(code) - (is_4 ? 0 : 128));
      if (!layout.minimum) return number;
      return __fsub_rn(number, number_of(record + kPackedRows * p.record_bytes, false));
    }
    default: {
      const float scale = reinterpret_cast<const float*>(extra)[row / layout.scale_rows];
      const float number =
          layout.codes == Codes::kE2m1 ? from_e2m1(code) : from_e4m3(static_cast<uint8_t>(code));
      if (layout.group == 0) return number * scale;
      const char* group_scales = extra + 4 * kPackedRows / layout.scale_rows;
      return number * group_scale_value(static_cast<uint8_t>(group_scales[at])) * scale;
    }
  }
}

// ---- kernels

// Dequantises a weight block; blockIdx.x along K, blockIdx.y along the rows' blocks.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_numbers_kernel(const __grid_constant__ DequantizeArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();  // earlier kernels may still read `out`
  const int row_block = p.first_row / kPackedRows + blockIdx.y;
  const char* block = p.blocks + (int64_t{row_block} * gridDim.x + blockIdx.x) * p.block_bytes;
  for (int i = threadIdx.x; i < kPackedRows * kPackedK; i += kThreads) {
    const int in_block = i / kPackedK, row = row_block * kPackedRows + in_block - p.first_row;
    const int k = static_cast<int>(blockIdx.x) * kPackedK + i % kPackedK;
    if (row < 0 || row >= p.rows || k >= p.k) continue;
    static_cast<T*>(p.out)[int64_t{row} * p.k + k] =
        from_float<T>(number_at(p, block, in_block, i % kPackedK));
  }
}

}  // namespace

// ---- launchers

void dequantize_numbers(const Context& ctx, const PackedDequantizeParams& params) {
  const PackedWeight& w = params.w;
  CHECK(w.layout.codes != Codes::kOther,
        "packed_dequantize: a layout from outside has no CUDA kernels, expected device cpu");
  const int64_t rows = params.out.size(0), last = params.first_row + rows - 1;
  if (rows == 0) return;
  const DequantizeArgs args{.out = params.out.data(),
                            .blocks = static_cast<const char*>(w.blocks),
                            .first_row = static_cast<int>(params.first_row),
                            .rows = static_cast<int>(rows),
                            .k = static_cast<int>(w.k),
                            .layout = w.layout,
                            .code_bytes = w.layout.code_bytes(),
                            .block_bytes = w.block_bytes(),
                            .groups = w.layout.groups(),
                            .record_bytes = w.layout.record_bytes()};
  const int64_t row_blocks = last / kPackedRows - params.first_row / kPackedRows + 1;
  const dim3 grid(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(row_blocks));
  dispatch_half(params.out.dtype(), [&](auto t) {
    launch(ctx, dequantize_numbers_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
