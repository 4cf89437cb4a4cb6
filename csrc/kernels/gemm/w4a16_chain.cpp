#include "kernels/gemm/w4a16_chain.h"

#include "kernels/rms_norm.h"

namespace cpmcu {

#ifdef CPMCU_SM90
namespace cuda {
void w4_chain_sm90(const Context& ctx, const W4ChainParams& params);
void w4_chain_prepare_sm90(const Context& ctx, const Tensor& memory);
}  // namespace cuda
#endif

bool w4_chain_runs([[maybe_unused]] const Context& ctx) {
#ifdef CPMCU_SM90
  return ctx.device.is_cuda() && ctx.compute_capability == 90 && !ctx.is_shared;
#else
  return false;
#endif
}

void w4_chain_prepare([[maybe_unused]] const Context& ctx, [[maybe_unused]] const Tensor& memory) {
#ifdef CPMCU_SM90
  if (w4_chain_runs(ctx)) cuda::w4_chain_prepare_sm90(ctx, memory);
#endif
}

namespace {

void check_chain(const W4ChainParams& p) {
  CHECK(!p.links.empty() && p.links.size() <= kMaxChainLinks,
        "w4_chain: {} links, expected 1 to {}", p.links.size(), kMaxChainLinks);
  const int64_t rows = p.links.front().x.size(0);
  for (size_t i = 0; i < p.links.size(); ++i) {
    const W4Link& link = p.links[i];
    check_w4_gemm({.y = link.y, .x = link.x, .w = link.w, .alpha = link.alpha, .beta = link.beta});
    CHECK(link.y.dtype() == link.x.dtype() && link.w.digits == 1 && link.x.size(0) == rows &&
              link.x.dtype() == p.links.front().x.dtype(),
          "w4_chain: link {} has {} rows of {}, y of {} and {} digits; expected the rows and the "
          "dtype of the first, and one digit",
          i, link.x.size(0), name_of(link.x.dtype()), name_of(link.y.dtype()), link.w.digits);
    if (link.normed.empty()) continue;
    CHECK(!link.w.gated && link.normed.num_elements() == link.y.num_elements() &&
              link.norm_weight.num_elements() == link.w.n && i + 1 < p.links.size() &&
              p.links[i + 1].x.data() == link.normed.data(),
          "w4_chain: the norm behind link {} is of {} and of {} weights; expected the rows of y, N "
          "weights, and that the next link reads it",
          i, link.normed.shape_text(), link.norm_weight.shape_text());
  }
}

}  // namespace

void w4_chain(const Context& ctx, const W4ChainParams& params) {
  check_chain(params);
#ifdef CPMCU_SM90
  if (w4_chain_runs(ctx)) return cuda::w4_chain_sm90(ctx, params);
#endif
  for (const W4Link& link : params.links) {
    w4_gemm(ctx, {.y = link.y,
                  .x = link.x,
                  .w = link.w,
                  .alpha = link.alpha,
                  .beta = link.beta,
                  .scratch = link.scratch});
    if (link.normed.empty()) continue;
    rms_norm(ctx,
             {.out = link.normed, .x = link.y, .weight = link.norm_weight, .eps = link.norm_eps});
  }
}

}  // namespace cpmcu
