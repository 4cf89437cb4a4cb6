// The router of a layer: scores x W^T in float32, and moe_route of them.
//
//   x = rms_norm(...), if there is a norm; logits = x W^T + bias; the routing of the logits
//
// The order of additions of a logit is that of skinny_gemm for any number of tokens, so a token's
// experts do not depend on the phase or on the other tokens. W may have further rows beyond the
// experts, such as the gate of a shared expert. Up to 64 tokens it is one launch.
#pragma once

#include "kernels/layer/rms_norm.h"
#include "kernels/moe/moe_route.h"

namespace cpmcu {

struct MoeRouterParams {
  Tensor logits;         // [T, R] float32, output
  Tensor x;              // [T, H]; an output if there is a norm
  Tensor w;              // [R, H], R at least E
  RmsNormParams norm{};  // its `out` is x; empty: there is no norm, and x is an input
  Tensor bias{};         // [1, E], the dtype of w; empty: none
  bool renormalise = false;
  Routing routing;  // output
  // [moe_router_bytes] uint8, zero before the first launch. The CPU does not use it.
  Tensor memory{};
};

// Bytes of the memory in which CTAs send each other logits; it is kept between launches.
constexpr int64_t moe_router_bytes(int64_t num_tokens, int64_t num_rows) {
  return 8 * (1 + std::min<int64_t>(num_tokens, kFewTokens) * num_rows);
}

inline void check_moe_router(const MoeRouterParams& p) {
  check_routing(p.routing);
  CHECK(p.x.num_dims() == 2 && p.w.num_dims() == 2 && p.w.dtype() == p.x.dtype() &&
            p.w.size(1) == p.x.size(1) && p.w.size(0) >= p.routing.num_experts &&
            p.logits.num_dims() == 2 && p.logits.dtype() == DType::kF32 &&
            p.logits.size(0) == p.x.size(0) && p.logits.size(1) == p.w.size(0),
        "moe_router: logits {} = x {} times w {}^T of {} experts does not fit",
        p.logits.shape_text(), p.x.shape_text(), p.w.shape_text(), p.routing.num_experts);
  CHECK(p.bias.empty() ||
            (p.bias.dtype() == p.w.dtype() && p.bias.num_elements() == p.routing.num_experts),
        "moe_router: a bias {} of {} for {} experts, expected one number of {} for each",
        p.bias.shape_text(), name_of(p.bias.dtype()), p.routing.num_experts, name_of(p.w.dtype()));
  CHECK(p.bias.empty() || p.w.size(0) == p.routing.num_experts,
        "moe_router: a bias for {} experts and {} rows of w, expected none beyond the experts",
        p.routing.num_experts, p.w.size(0));
  CHECK(p.norm.out.empty() || p.norm.out.data() == p.x.data(),
        "moe_router: the norm writes {}, expected x {}", p.norm.out.shape_text(), p.x.shape_text());
}

REGISTER_OP(moe_router, MoeRouterParams)

}  // namespace cpmcu
