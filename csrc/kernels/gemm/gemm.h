// y = alpha * x W^T + beta * y, float32 accumulation, W row-major [N, K].
//
// `skinny_gemm` (1..64 rows; more go in blocks of 64): streams W once; the order in which a row's products are added depends
// on N and K only, so a row's bits are the same whatever the number of rows. `large_gemm`: many
// rows, cuBLASLt where it was found (one algorithm per N, K, whatever the rows), else skinny_gemm
// over blocks of 64 rows.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

constexpr int kMaxSkinnyRows = 64;

struct GemmParams {
  Tensor y;  // [M, N], dtype of x, or float32
  Tensor x;  // [M, K], K a multiple of 8
  Tensor w;  // [N, K], dtype of x
  float alpha = 1;
  float beta = 0;  // 0: y is not read
};

REGISTER_OP(skinny_gemm, GemmParams)
REGISTER_OP(large_gemm, GemmParams)

}  // namespace cpmcu
