// y = alpha * x W^T + beta * y, float32 accumulation, W row-major [N, K].
//
// `skinny_gemm`: 1 to 64 rows; more rows go in blocks of 64. W is read once. The order of additions
// depends on N and K only, so a row's bits do not depend on the number of rows.
//
// `large_gemm`: rows of a prompt, with the same property. On Hopper it is a kernel of this engine
// (y of x's dtype, N a multiple of 8). Otherwise it is cuBLASLt with one algorithm per N and K, or
// skinny_gemm if there is no cuBLASLt.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/op.h"

namespace cpmcu {

constexpr int kMaxSkinnyRows = 64;

// Whether large_gemm and packed_gemm have fast kernels of this engine for the rows of a prompt.
inline bool has_prompt_gemm([[maybe_unused]] int compute_capability) {
#ifdef CPMCU_SM90
  return compute_capability == 90;
#else
  return false;
#endif
}

// The kernel for `rows` rows has this number of groups of 8 rows: a power of two, at most `most`.
constexpr int row_groups(int64_t rows, int64_t most = kMaxSkinnyRows) {
  return static_cast<int>(
      std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(rows, 1, most) + 7) / 8));
}

struct GemmParams {
  Tensor y;  // [M, N], dtype of x, or float32
  Tensor x;  // [M, K], K a multiple of 8
  Tensor w;  // [N, K], dtype of x
  float alpha = 1;
  float beta = 0;        // 0: y is not read
  int64_t y_stride = 0;  // elements from one row of y to the next; 0: N
};

inline void check_gemm(const GemmParams& p) {
  CHECK(p.x.num_dims() == 2 && p.w.num_dims() == 2 && p.y.num_dims() == 2 &&
            p.w.size(1) == p.x.size(1) && p.y.size(0) == p.x.size(0) && p.y.size(1) == p.w.size(0),
        "gemm: y {} = x {} times w {}^T does not fit", p.y.shape_text(), p.x.shape_text(),
        p.w.shape_text());
  CHECK(p.y_stride == 0 || p.y_stride >= p.w.size(0),
        "gemm: rows of y have {} elements at a stride of {}, expected no less", p.w.size(0),
        p.y_stride);
  CHECK(p.x.size(1) % 8 == 0, "gemm: K is {}, expected a multiple of 8", p.x.size(1));
  CHECK(is_floating(p.x.dtype()) && p.w.dtype() == p.x.dtype() &&
            (p.y.dtype() == p.x.dtype() || p.y.dtype() == DType::kF32),
        "gemm: y is {}, x {}, w {}; expected one floating dtype, y may be float32",
        name_of(p.y.dtype()), name_of(p.x.dtype()), name_of(p.w.dtype()));
}

// out = silu(x gate^T) * (x up^T) for rows of a prompt; W stacks gate and up. A row's bits do not
// depend on other rows. On Hopper it is one kernel (I a multiple of 8), elsewhere large_gemm and
// silu_mul.
struct GatedGemmParams {
  Tensor out;      // [M, I]
  Tensor x;        // [M, K], K a multiple of 8
  Tensor w;        // [2 I, K]; out, x and w have one dtype
  Tensor scratch;  // [M, 2 I], same dtype; used by the two-kernel path
};

inline void check_gated_gemm(const GatedGemmParams& p) {
  const GemmParams gemm{.y = p.scratch, .x = p.x, .w = p.w};
  check_gemm(gemm);
  CHECK(p.out.num_dims() == 2 && p.out.size(0) == p.x.size(0) && 2 * p.out.size(1) == p.w.size(0) &&
            p.out.dtype() == p.x.dtype() && p.scratch.dtype() == p.x.dtype(),
        "gated_gemm: out is {} {} and scratch {}, expected {} [{}, {}]", name_of(p.out.dtype()),
        p.out.shape_text(), name_of(p.scratch.dtype()), name_of(p.x.dtype()), p.x.size(0),
        p.w.size(0) / 2);
}

// y = RMSNorm(x) W^T for the few rows of a decode step, without a launch for the norm. A row's bits
// do not depend on other rows. On CUDA, the kernel multiplies x by W * (norm_weight + norm_offset)
// in float32, then divides the sum by the root mean square. On the CPU, RMSNorm(x) is rounded.
struct NormedGemmParams {
  Tensor y;            // [M, N]
  Tensor x;            // [M, K], K a multiple of 8
  Tensor w;            // [N, K]
  Tensor norm_weight;  // [K]; y, x, w and norm_weight have one dtype
  float norm_eps = 1e-6f;
  float norm_offset = 0;  // 1: the weights are zero-centred
};

inline void check_normed_gemm(const NormedGemmParams& p) {
  check_gemm({.y = p.y, .x = p.x, .w = p.w});
  CHECK(p.norm_weight.num_elements() == p.x.size(1) && p.norm_weight.dtype() == p.x.dtype() &&
            p.y.dtype() == p.x.dtype(),
        "normed_gemm: y is {}, norm_weight {} {}, expected {} and {} elements",
        name_of(p.y.dtype()), name_of(p.norm_weight.dtype()), p.norm_weight.shape_text(),
        name_of(p.x.dtype()), p.x.size(1));
}

REGISTER_OP(normed_gemm, NormedGemmParams)
REGISTER_OP(skinny_gemm, GemmParams)
REGISTER_OP(large_gemm, GemmParams)
REGISTER_OP(gated_gemm, GatedGemmParams)

}  // namespace cpmcu
