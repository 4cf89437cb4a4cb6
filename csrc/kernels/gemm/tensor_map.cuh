// TMA tensor maps of x and of 16-bit W.
#pragma once

#include <cuda.h>

#include <cstring>

#include "core/check.h"
#include "core/dtype.h"
#include "kernels/gemm/x_rows.cuh"

namespace cpmcu::cuda {
namespace {

// A map of 16-bit elements whose boxes have rows of 128 bytes. `sizes` and `box` start with the
// innermost dimension; `strides` are bytes, from the second dimension on.
inline TensorMap make_map(const void* from, DType dtype, int dimensions, const cuuint64_t* sizes,
                          const cuuint64_t* strides, const cuuint32_t* box) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result));
    CHECK(
        result == cudaDriverEntryPointSuccess,
        "the CUDA driver has no cuTensorMapEncodeTiled, expected a driver for CUDA 12.0 or newer");
    return reinterpret_cast<Encode>(function);
  }();
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult status = encode(
      &map,
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      dimensions, const_cast<void*>(from), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with {} for rows of {} elements",
        static_cast<int>(status), sizes[0]);
  TensorMap out;
  static_assert(sizeof(out) == sizeof(map));
  std::memcpy(&out, &map, sizeof(map));
  return out;
}
// For rows [m, K]: boxes of box_rows x 64 k.
inline TensorMap make_map(const void* x, int m, int k, DType dtype, int box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[] = {2 * sizes[0]};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)};
  return make_map(x, dtype, 2, sizes, strides, box);
}
// For `count` W [n, K] that stack gate and up: boxes of box_rows x 64 k that interleave eight rows
// of gate and eight of up. Matrix i begins at i n / 8 of the last dimension.
inline TensorMap make_gated_map(const void* w, int n, int k, DType dtype, int box_rows,
                                int count = 1) {
  const auto row_bytes = 2 * static_cast<cuuint64_t>(k);
  const auto half = static_cast<cuuint64_t>(n) / 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), 8, 2, (2 * count - 1) * half / 8};
  const cuuint64_t strides[] = {row_bytes, half * row_bytes, 8 * row_bytes};
  const cuuint32_t box[] = {64, 8, 2, static_cast<cuuint32_t>(box_rows) / 16};
  return make_map(w, dtype, 4, sizes, strides, box);
}

}  // namespace
}  // namespace cpmcu::cuda
