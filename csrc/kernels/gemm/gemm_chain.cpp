#include "kernels/gemm/gemm_chain.h"

#include "kernels/gemm/gemm.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/layer/silu_mul.h"

namespace cpmcu {

#ifdef CPMCU_SM90
namespace cuda {
void gemm_chain_sm90(const Context& ctx, const ChainParams& params);
void gemm_chain_prepare_sm90(const Context& ctx, const Tensor& memory);
}  // namespace cuda
#endif

int64_t gemm_chain_bytes([[maybe_unused]] int64_t max_rows) {
#ifdef CPMCU_SM90
  const int64_t groups = row_groups(max_rows);
  return kChainStateBytes +
         kChainSumBytes * (groups <= kMaxToldGroups ? groups : kMaxToldGroups + groups);
#else
  return 0;
#endif
}

bool gemm_chain_runs([[maybe_unused]] const Context& ctx) {
#ifdef CPMCU_SM90
  return ctx.device.is_cuda() && ctx.compute_capability == 90 && !ctx.is_shared;
#else
  return false;
#endif
}

void gemm_chain_prepare([[maybe_unused]] const Context& ctx,
                        [[maybe_unused]] const Tensor& memory) {
#ifdef CPMCU_SM90
  if (gemm_chain_runs(ctx)) cuda::gemm_chain_prepare_sm90(ctx, memory);
#endif
}

bool can_follow(const ChainLink& last, const RotaryKvParams& rotary) {
  const int dim = rotary.head_dim;
  return rotary.qkv.data() == last.y.data() && rotary.rows.num_rows == last.y.size(0) &&
         rotary.layout.is_packed() && rotary_dim_of(rotary) == dim && !last.is_gated() &&
         last.beta == 0 && rotary.q_norm.empty() && rotary.k_norm.empty() && dim >= 64 &&
         kW4BlockRows % dim == 0;
}

namespace {

// What both kinds of weights are asked for.
void check_product(const ChainLink& link) {
  if (!link.is_dense()) {
    return check_w4_gemm(
        {.y = link.y, .x = link.x, .w = link.w4, .alpha = link.alpha, .beta = link.beta});
  }
  const bool fits = link.y.num_dims() == 2 && link.x.num_dims() == 2 && link.w.num_dims() == 2 &&
                    link.w.size(1) == link.x.size(1) && link.y.size(0) == link.x.size(0) &&
                    link.y.size(1) == link.out_features();
  CHECK(fits && link.w.dtype() == link.x.dtype() && link.x.size(1) % 8 == 0 &&
            (!link.gated || (link.w.size(0) % 16 == 0 && link.alpha == 1 && link.beta == 0)),
        "gemm_chain: y {} = x {} times w {}^T of {} does not fit", link.y.shape_text(),
        link.x.shape_text(), link.w.shape_text(), name_of(link.w.dtype()));
}

void check_chain(const ChainParams& p) {
  CHECK(!p.links.empty() && p.links.size() <= kMaxChainLinks,
        "gemm_chain: {} links, expected 1 to {}", p.links.size(), kMaxChainLinks);
  CHECK(p.following.size() <= kMaxFollowing, "gemm_chain: {} products follow, expected up to {}",
        p.following.size(), kMaxFollowing);
  const ChainLink& first = p.links.front();
  for (size_t i = 0; i < p.links.size(); ++i) {
    const ChainLink& link = p.links[i];
    check_product(link);
    CHECK(link.y.dtype() == link.x.dtype() && link.w4.digits == 1 &&
              link.x.size(0) == first.x.size(0) && link.x.dtype() == first.x.dtype() &&
              link.is_dense() == first.is_dense(),
          "gemm_chain: link {} has {} rows of {}, y of {}, {} digits and W of {} bits; expected "
          "the rows, the dtype and the bits of the first, and one digit",
          i, link.x.size(0), name_of(link.x.dtype()), name_of(link.y.dtype()), link.w4.digits,
          link.is_dense() ? 16 : 4);
    if (link.normed.empty()) continue;
    CHECK(!link.is_gated() && link.normed.num_elements() == link.y.num_elements() &&
              link.norm_weight.num_elements() == link.out_features() && i + 1 < p.links.size() &&
              p.links[i + 1].x.data() == link.normed.data(),
          "gemm_chain: the norm behind link {} is of {} and of {} weights; expected the rows of y, "
          "N weights, and that the next link reads it",
          i, link.normed.shape_text(), link.norm_weight.shape_text());
  }
  const Tensor& attended = p.attention.out;
  CHECK(attended.empty() ||
            (attended.data() == first.x.data() && p.attention.rows.num_rows == first.x.size(0)),
        "gemm_chain: attention of {} rows is not what the first link reads, {}",
        p.attention.rows.num_rows, first.x.shape_text());
  if (p.rotary.qkv.empty()) return;
  const ChainLink& last = p.links.back();
  CHECK(can_follow(last, p.rotary),
        "gemm_chain: rotary_kv of {} rows of {} dimensions does not fit behind a link of y {}",
        p.rotary.rows.num_rows, p.rotary.head_dim, last.y.shape_text());
}

void multiply(const Context& ctx, const ChainLink& link) {
  if (!link.is_dense()) {
    w4_gemm(ctx, {.y = link.y,
                  .x = link.x,
                  .w = link.w4,
                  .alpha = link.alpha,
                  .beta = link.beta,
                  .scratch = link.scratch});
  } else if (link.gated) {
    skinny_gemm(ctx, {.y = link.scratch, .x = link.x, .w = link.w});
    silu_mul(ctx, {.out = link.y, .x = link.scratch});
  } else {
    skinny_gemm(ctx,
                {.y = link.y, .x = link.x, .w = link.w, .alpha = link.alpha, .beta = link.beta});
  }
}

}  // namespace

void gemm_chain(const Context& ctx, const ChainParams& params) {
  check_chain(params);
#ifdef CPMCU_SM90
  if (gemm_chain_runs(ctx)) return cuda::gemm_chain_sm90(ctx, params);
#endif
  if (!params.attention.out.empty()) attention_combine(ctx, params.attention);
  for (const ChainLink& link : params.links) {
    multiply(ctx, link);
    if (link.normed.empty()) continue;
    rms_norm(ctx,
             {.out = link.normed, .x = link.y, .weight = link.norm_weight, .eps = link.norm_eps});
  }
  if (!params.rotary.qkv.empty()) rotary_kv(ctx, params.rotary);
}

}  // namespace cpmcu
