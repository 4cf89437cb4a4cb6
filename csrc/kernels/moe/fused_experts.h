// A layer of experts as one launch: the norm and the router, gate and up, down, the weighted sum,
// and the next norm.
//
// `fused_experts` has the bits of these ops one after another. On Hopper it is one launch for up to
// kMaxFusedTokens tokens, on other devices and for more tokens it calls the ops.
#pragma once

#include "kernels/moe/expert_gemm.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_router.h"

namespace cpmcu {

constexpr int kMaxFusedTokens = 8;

// The weights of a layer's experts.
struct FusedExpertsWeights {
  PackedWeight gate_up, down;  // of expert 0
  int64_t gate_up_stride = 0, down_stride = 0;
};

struct FusedExpertsParams {
  MoeRouterParams router;  // with a norm
  FusedExpertsWeights weights;
  Tensor act;                // [P, I], scratch
  MoeCombineParams combine;  // `y` is scratch; the routing is the router's
  Tensor memory{};           // [fused_experts_bytes] uint8, zero before the first launch
};

// Bytes of the memory in which CTAs send each other numbers; it is kept between launches.
int64_t fused_experts_bytes(int64_t num_experts, int64_t top_k, int64_t width, int64_t hidden);

// Whether the launch of a layer of this shape is one kernel, for few tokens.
bool can_fuse_experts(const FusedExpertsWeights& weights, const MoeRouterParams& router,
                      const MoeCombineParams& combine);

// Graph-safe.
void fused_experts(const Context& ctx, const FusedExpertsParams& params);

}  // namespace cpmcu
