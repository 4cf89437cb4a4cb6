// GEMMs with the weights of each pair's expert, for the pairs of moe_route:
//   y[p] = x[row of p] W[expert of p]^T + bias
// If W stacks gate and up, y[p] = silu(x gate^T) * (x up^T). If rows of gate and up alternate, y[p]
// is a clamped SwiGLU with a bias (`swiglu_limit`).
//
// `expert_gemm` has weights of 16 bits (32 on the CPU), `packed_expert_gemm` has weights in the
// blocks of kernels/gemm/packed/packed.h. The order of additions depends on N and K only, so a
// pair's bits do not depend on the other pairs. Which experts are read is decided on the device.
#pragma once

#include "kernels/gemm/packed/packed.h"
#include "kernels/moe/moe_route.h"

namespace cpmcu {

struct ExpertRows {
  Tensor y;  // [P, N], gated [P, N / 2]; dtype of x, or float32
  Tensor x;  // [P / pairs_per_x, K], K a multiple of 8
  // Pair p reads row p / pairs_per_x of x. The number is k if a row of x is a token, else 1.
  int pairs_per_x = 1;
  Routing routing;  // the routing of the P pairs
  // Whether an earlier launch was a GEMM of experts with the same routing. If so, the kernel reads
  // the routing and requests weights before the previous launch ends.
  bool routing_is_complete = false;
  Tensor bias{};  // [E, N], dtype of x; empty: none. It is added in float32
  // A limit above 0: y [P, N / 2] is kClampedSwiglu (gated_activation.h) of gate and up with the
  // bias. The sums are rounded to the dtype of x first. Row 2 i of W is gate i, row 2 i + 1 is
  // up i.
  float swiglu_alpha = 1, swiglu_limit = 0;
};

struct ExpertGemmParams {
  ExpertRows rows;
  Tensor w;  // [E, N, K], dtype of x
  bool gated = false;
};

struct PackedExpertGemmParams {
  ExpertRows rows;
  PackedWeight w;      // weights of expert 0; those of expert e lie e * stride bytes behind
  int64_t stride = 0;  // bytes from one expert's blocks to the next
};

// `width`: the columns of y without `swiglu_limit`.
inline void check_expert_rows(const char* op, const ExpertRows& rows, int64_t width, int64_t k) {
  check_routing(rows.routing);
  if (const Tensor& bias = rows.bias; !bias.empty()) {
    CHECK(bias.num_dims() == 2 && bias.size(0) == rows.routing.num_experts &&
              bias.size(1) == width && bias.dtype() == rows.x.dtype(),
          "{}: the bias is {} {}, expected {} rows of {} of x's dtype", op, name_of(bias.dtype()),
          bias.shape_text(), rows.routing.num_experts, width);
  }
  if (rows.swiglu_limit > 0) {
    CHECK(
        !rows.bias.empty() && width % 16 == 0 && rows.y.dtype() == rows.x.dtype(),
        "{}: an activation of {} rows to {} without a bias or a multiple of 16, expected both and "
        "x's dtype",
        op, width, name_of(rows.y.dtype()));
    width /= 2;
  }
  CHECK(rows.x.num_dims() == 2 && rows.y.num_dims() == 2 && rows.pairs_per_x >= 1 &&
            rows.y.size(0) == rows.x.size(0) * rows.pairs_per_x && rows.x.size(1) == k &&
            rows.y.size(1) == width && rows.y.size(0) % rows.routing.top_k == 0,
        "{}: y {} = x {} with {} pairs a row does not fit experts of {} inputs and {} outputs", op,
        rows.y.shape_text(), rows.x.shape_text(), rows.pairs_per_x, k, width);
  CHECK(k % 8 == 0 && width % 8 == 0, "{}: an expert is [{}, {}], expected multiples of 8", op,
        width, k);
  CHECK(is_floating(rows.x.dtype()) &&
            (rows.y.dtype() == rows.x.dtype() || rows.y.dtype() == DType::kF32),
        "{}: y is {} and x {}; expected one floating dtype, y may be float32", op,
        name_of(rows.y.dtype()), name_of(rows.x.dtype()));
}

inline void check_expert_gemm(const ExpertGemmParams& p) {
  CHECK(!p.gated || p.rows.bias.empty(),
        "expert_gemm: W is gated and has a bias, expected one of them");
  CHECK(p.w.num_dims() == 3 && p.w.size(0) == p.rows.routing.num_experts &&
            p.w.dtype() == p.rows.x.dtype() && (!p.gated || p.w.size(1) % 16 == 0),
        "expert_gemm: w is {} {}, expected {} of {} experts", name_of(p.w.dtype()),
        p.w.shape_text(), name_of(p.rows.x.dtype()), p.rows.routing.num_experts);
  check_expert_rows("expert_gemm", p.rows, p.w.size(1) / (p.gated ? 2 : 1), p.w.size(2));
}

inline void check_packed_expert_gemm(const PackedExpertGemmParams& p) {
  check_packed_weight(p.w);
  CHECK(!p.w.gated || p.rows.bias.empty(),
        "packed_expert_gemm: W is gated and has a bias, expected one of them");
  CHECK(p.w.layout.planes == 1, "packed_expert_gemm: W has {} planes, expected 1",
        p.w.layout.planes);
  CHECK(p.stride >= p.w.num_bytes() && p.stride % 16 == 0,
        "packed_expert_gemm: experts of {} bytes are {} bytes apart, expected a multiple of 16 "
        "that is "
        "no less",
        p.w.num_bytes(), p.stride);
  check_expert_rows("packed_expert_gemm", p.rows, p.w.out_features(), p.w.k);
}

REGISTER_OP(expert_gemm, ExpertGemmParams)
REGISTER_OP(packed_expert_gemm, PackedExpertGemmParams)

}  // namespace cpmcu
