#include "kernels/moe/moe_router.h"

#include "kernels/gemm/gemm.h"
#include "kernels/layer/add_bias.h"

namespace cpmcu::cpu {

void moe_router(const Context& ctx, const MoeRouterParams& p) {
  check_moe_router(p);
  if (!p.norm.out.empty()) cpu::rms_norm(ctx, p.norm);
  cpu::skinny_gemm(ctx, {.y = p.logits, .x = p.x, .w = p.w});
  if (!p.bias.empty()) cpu::add_bias(ctx, {.y = p.logits, .bias = p.bias});
  cpu::moe_route(ctx, {.logits = p.logits, .renormalise = p.renormalise, .routing = p.routing});
}

}  // namespace cpmcu::cpu
