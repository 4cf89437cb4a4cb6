#include "kernels/moe/fused_experts.h"

#include <algorithm>

#include "kernels/gemm/fused_layer.h"

namespace cpmcu {

#ifdef CPMCU_SM90
namespace cuda {
// False: the device can't run it as one launch.
bool fused_experts_sm90(const Context& ctx, const FusedExpertsParams& params);
}  // namespace cuda
#endif

int64_t fused_experts_bytes(int64_t num_experts, int64_t top_k, int64_t width, int64_t hidden) {
  const int64_t acts = kMaxFusedTokens * top_k * ((width + 15) / 16) * 8;
  return 8 * (2 + acts + kMaxFusedTokens * (num_experts + hidden / 8));
}

namespace {

// The layouts that most checkpoints have.
bool has_kernel(const PackedLayout& layout) {
  return layout.planes == 1 &&
         (layout.codes == Codes::kE2m1 ||
          (layout.group == 0 && (layout.codes == Codes::kInt4 || layout.codes == Codes::kE4m3)));
}

}  // namespace

bool can_fuse_experts(const FusedExpertsWeights& weights, const MoeRouterParams& router,
                      const MoeCombineParams& combine) {
  const PackedWeight &gate_up = weights.gate_up, &down = weights.down;
  const int64_t hidden = gate_up.k, tokens = kMaxFusedTokens;
  return gate_up.gated && has_kernel(gate_up.layout) && gate_up.layout.unpacks_like(down.layout) &&
         down.n == hidden && hidden % 32 == 0 && hidden <= 4096 && down.k % 8 == 0 &&
         router.w.size(0) == router.routing.num_experts && router.routing.num_experts <= 256 &&
         tokens * router.routing.top_k <= 128 && combine.shared.empty();
}

void fused_experts(const Context& ctx, const FusedExpertsParams& p) {
  const int64_t num_tokens = p.router.x.size(0);
  if (num_tokens == 0) return;
#ifdef CPMCU_SM90
  if (fused_layer_runs(ctx) && num_tokens <= kMaxFusedTokens && !p.router.norm.out.empty() &&
      can_fuse_experts(p.weights, p.router, p.combine) && cuda::fused_experts_sm90(ctx, p)) {
    return;
  }
#endif
  const Routing& routing = p.router.routing;
  moe_router(ctx, p.router);
  packed_expert_gemm(
      ctx, {.rows = {.y = p.act, .x = p.router.x, .pairs_per_x = routing.top_k, .routing = routing},
            .w = p.weights.gate_up,
            .stride = p.weights.gate_up_stride});
  packed_expert_gemm(
      ctx, {.rows = {.y = p.combine.y, .x = p.act, .routing = routing, .routing_is_complete = true},
            .w = p.weights.down,
            .stride = p.weights.down_stride});
  moe_combine(ctx, p.combine);
}

}  // namespace cpmcu
