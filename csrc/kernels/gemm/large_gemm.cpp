// Selects the kernel for rows of a prompt.
#ifdef CPMCU_WITH_CUDA
#include "kernels/gemm/gemm.h"
#include "kernels/layer/silu_mul.h"

namespace cpmcu::cuda {

#ifdef CPMCU_SM90
// large_gemm_sm90.cu. If gated, y is [M, N / 2].
void large_gemm_sm90(const Context& ctx, const GemmParams& params, bool gated);
#endif

void large_gemm(const Context& ctx, const GemmParams& params) {
  check_gemm(params);
#ifdef CPMCU_SM90
  // The kernel writes 16 bytes of a row at a time. The choice must not depend on M.
  if (has_prompt_gemm(ctx.compute_capability) && params.y.dtype() == params.x.dtype() &&
      params.w.size(0) % 8 == 0 && params.y_stride % 8 == 0) {
    return large_gemm_sm90(ctx, params, false);
  }
#endif
  if (ctx.cublas == nullptr) return cuda::skinny_gemm(ctx, params);
  ctx.cublas->gemm(ctx, params.y, params.x, params.w, params.alpha, params.beta,
                   params.y_stride ? params.y_stride : params.w.size(0));
}

void gated_gemm(const Context& ctx, const GatedGemmParams& p) {
  check_gated_gemm(p);
#ifdef CPMCU_SM90
  if (has_prompt_gemm(ctx.compute_capability) && p.out.size(1) % 8 == 0) {
    return large_gemm_sm90(ctx, {.y = p.out, .x = p.x, .w = p.w}, true);
  }
#endif
  cuda::large_gemm(ctx, {.y = p.scratch, .x = p.x, .w = p.w});
  cuda::silu_mul(ctx, {.out = p.out, .x = p.scratch});
}

}  // namespace cpmcu::cuda
#endif
