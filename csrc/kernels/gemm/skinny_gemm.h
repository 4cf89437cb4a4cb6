// Common declarations of the kernels of skinny_gemm (gemm.h), for up to 64 rows of x.
#pragma once

#include "kernels/gemm/gemm.h"

namespace cpmcu::cuda {

struct SkinnyArgs {
  void* y;        // [M, N], dtype of x or float32
  const void* x;  // [M, K]
  const void* w;  // [N, K]
  int m, n, k;
  int64_t y_stride;  // elements from one row of y to the next
  float alpha, beta;
};

constexpr int kMaxTallRows = 128;  // maximum number of rows of x in a launch of a tall GEMM

// Whether W has enough rows for a tall GEMM: at least a tile of 128 for each SM. Independent of M.
inline bool is_tall(const Context& ctx, int64_t n) { return n >= 128 * int64_t{ctx.sm_count}; }
void tall_gemm(const Context& ctx, DType x, DType y, const SkinnyArgs& args);

}  // namespace cpmcu::cuda
