#include "kernels/gemm/fused_layer.h"

#include <algorithm>
#include <utility>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/add_bias.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/layer/silu_mul.h"
#include "kernels/ranks/rank_sum.h"

namespace cpmcu {

namespace cuda {
#ifdef CPMCU_SM80
void fused_layer_sm80(const Context& ctx, const FusedLayerParams& params);
#endif
#ifdef CPMCU_SM90
void fused_layer_sm90(const Context& ctx, const FusedLayerParams& params);
void fused_layer_ranks_sm90(const Context& ctx, const FusedLayerParams& params);
#endif
}  // namespace cuda

int64_t fused_layer_bytes([[maybe_unused]] int64_t max_rows) {
#ifdef CPMCU_WITH_CUDA
  // Some layouts take 9 to 16 rows as four groups.
  const int64_t groups = row_groups(max_rows, kMaxFusedRows);
  return kFusedStateBytes +
         kFusedSumBytes * (groups == 1 ? 1 : kMaxFlaggedGroups + std::max<int64_t>(groups, 4));
#else
  return 0;
#endif
}

FusedForms fused_forms_of(int capability) {
  return capability == 90   ? FusedForms::kAll
         : capability >= 80 ? FusedForms::kPortable
                            : FusedForms::kNone;
}

FusedForms fused_forms(const Context& ctx) {
  if (!ctx.device.is_cuda() || ctx.is_shared) return FusedForms::kNone;
#ifndef CPMCU_SM90
  if (ctx.compute_capability == 90) return FusedForms::kPortable;
#endif
  return fused_forms_of(ctx.compute_capability);
}

void fused_layer_prepare(const Context& ctx, const Tensor& memory) {
  if (fused_forms(ctx) == FusedForms::kNone) return;
  fill_bytes(ctx.device, memory.data(), 0xFF, memory.num_bytes(), ctx.stream);
  fill_bytes(ctx.device, memory.data(), 0, kFusedStateBytes, ctx.stream);
}

bool can_follow(const RotaryKvParams& rotary) {
  const int dim = rotary.head_dim;
  return rotary.layout.is_packed() && rotary_dim_of(rotary) == dim && rotary.k_scales.empty() &&
         rotary.q_norm.empty() && rotary.k_norm.empty() && dim >= 64 && kPackedRows % dim == 0;
}

namespace {

void check_gemm(const FusedGemm& gemm) {
  if (!gemm.is_dense()) {
    return check_packed_gemm(
        {.y = gemm.y, .x = gemm.x, .w = gemm.packed, .alpha = gemm.alpha, .beta = gemm.beta});
  }
  const bool fits = gemm.y.num_dims() == 2 && gemm.x.num_dims() == 2 && gemm.w.num_dims() == 2 &&
                    gemm.w.size(1) == gemm.x.size(1) && gemm.y.size(0) == gemm.x.size(0) &&
                    gemm.y.size(1) == gemm.out_features();
  CHECK(fits && gemm.w.dtype() == gemm.x.dtype() && gemm.x.size(1) % 8 == 0 &&
            (!gemm.gated || (gemm.w.size(0) % 16 == 0 && gemm.alpha == 1 && gemm.beta == 0)),
        "fused_layer: y {} = x {} times w {}^T of {} does not fit", gemm.y.shape_text(),
        gemm.x.shape_text(), gemm.w.shape_text(), name_of(gemm.w.dtype()));
}

void check_fused_layer(const FusedLayerParams& p) {
  CHECK(!p.gemms.empty() && p.gemms.size() <= kMaxFusedGemms,
        "fused_layer: {} gemms, expected 1 to {}", p.gemms.size(), kMaxFusedGemms);
  CHECK(p.following.size() <= kMaxFollowing, "fused_layer: {} weights follow, expected up to {}",
        p.following.size(), kMaxFollowing);
  const FusedGemm& first = p.gemms.front();
  for (size_t i = 0; i < p.gemms.size(); ++i) {
    const FusedGemm& gemm = p.gemms[i];
    check_gemm(gemm);
    CHECK(gemm.y.dtype() == gemm.x.dtype() && fuses(FusedForms::kAll, gemm.packed.layout) &&
              gemm.packed.layout.unpacks_like(first.packed.layout) &&
              gemm.x.size(0) == first.x.size(0) && gemm.x.dtype() == first.x.dtype() &&
              gemm.is_dense() == first.is_dense(),
          "fused_layer: gemm {} has {} rows of {}, y of {}, {} planes and W of {} bits; expected "
          "the rows, the dtype and the layout of the first gemm, and one plane",
          i, gemm.x.size(0), name_of(gemm.x.dtype()), name_of(gemm.y.dtype()),
          gemm.packed.layout.planes, gemm.is_dense() ? 16 : gemm.packed.layout.bits());
    CHECK(gemm.bias.empty() ||
              (gemm.bias.dtype() == gemm.y.dtype() &&
               gemm.bias.num_elements() == gemm.out_features() && !gemm.is_gated() &&
               gemm.normed.empty() && (p.rotary.qkv.empty() || i + 1 < p.gemms.size())),
          "fused_layer: gemm {} has a bias {} and y {}; expected N numbers, and no gate, norm or "
          "rotary_kv",
          i, gemm.bias.shape_text(), gemm.y.shape_text());
    CHECK(
        gemm.part.empty() ||
            (gemm.part.dtype() == gemm.y.dtype() &&
             gemm.part.num_elements() == gemm.y.num_elements() && !gemm.is_gated() &&
             gemm.bias.empty() && (gemm.beta == 0 || gemm.beta == 1) && p.gemms.size() > 1 &&
             (p.rotary.qkv.empty() || i + 1 < p.gemms.size())),
        "fused_layer: gemm {} of {} has a part {} and y {}; expected the shape of y, another gemm, "
        "beta 0 or 1, and no gate, bias or rotary_kv",
        i, p.gemms.size(), gemm.part.shape_text(), gemm.y.shape_text());
    if (gemm.normed.empty()) continue;
    CHECK(
        !gemm.is_gated() && gemm.normed.num_elements() == gemm.y.num_elements() &&
            gemm.norm_weight.num_elements() == gemm.out_features() && i + 1 < p.gemms.size() &&
            p.gemms[i + 1].x.data() == gemm.normed.data(),
        "fused_layer: the norm after gemm {} has rows {} and weights {}; expected the shape of y, "
        "N weights, and a next gemm that reads it",
        i, gemm.normed.shape_text(), gemm.norm_weight.shape_text());
  }
  const Tensor& attended = p.attention.out;
  CHECK(attended.empty() ||
            (attended.data() == first.x.data() && p.attention.tokens.num_tokens == first.x.size(0)),
        "fused_layer: attention of {} tokens does not write x of the first gemm, {}",
        p.attention.tokens.num_tokens, first.x.shape_text());
  if (p.rotary.qkv.empty()) return;
  const FusedGemm& last = p.gemms.back();
  CHECK(can_follow(p.rotary) && p.rotary.qkv.data() == last.y.data() &&
            p.rotary.tokens.num_tokens == last.y.size(0) && !last.is_gated() && last.beta == 0,
        "fused_layer: rotary_kv of {} tokens with head_dim {} does not fit after a gemm of y {}",
        p.rotary.tokens.num_tokens, p.rotary.head_dim, last.y.shape_text());
}

void multiply(const Context& ctx, const FusedGemm& gemm) {
  if (!gemm.part.empty()) {
    FusedGemm own = gemm;
    own.y = std::exchange(own.part, {}), own.beta = 0;
    multiply(ctx, own);
    rank_sum(ctx, {.hidden = gemm.y, .part = gemm.part, .adds = gemm.beta != 0});
  } else if (!gemm.is_dense()) {
    packed_gemm(ctx, {.y = gemm.y,
                      .x = gemm.x,
                      .w = gemm.packed,
                      .alpha = gemm.alpha,
                      .beta = gemm.beta,
                      .scratch = gemm.scratch});
  } else if (gemm.gated) {
    skinny_gemm(ctx, {.y = gemm.scratch, .x = gemm.x, .w = gemm.w});
    silu_mul(ctx, {.out = gemm.y, .x = gemm.scratch});
  } else {
    skinny_gemm(ctx,
                {.y = gemm.y, .x = gemm.x, .w = gemm.w, .alpha = gemm.alpha, .beta = gemm.beta});
  }
}

}  // namespace

void fused_layer(const Context& ctx, const FusedLayerParams& params) {
  check_fused_layer(params);
  // packed_gemm adds in another order, so the choice must not depend on the number of rows.
  const FusedGemm& first = params.gemms.front();
  const bool is_alone = params.gemms.size() == 1 && !first.is_dense() && params.rotary.qkv.empty();
  [[maybe_unused]] const bool sums_ranks =
      std::any_of(params.gemms.begin(), params.gemms.end(),
                  [](const FusedGemm& gemm) { return !gemm.part.empty(); });
  [[maybe_unused]] const FusedForms forms = is_alone ? FusedForms::kNone : fused_forms(ctx);
#ifdef CPMCU_SM90
  if (forms == FusedForms::kAll) {
    return sums_ranks ? cuda::fused_layer_ranks_sm90(ctx, params)
                      : cuda::fused_layer_sm90(ctx, params);
  }
#endif
#ifdef CPMCU_SM80
  if (forms == FusedForms::kPortable && !sums_ranks && !first.is_dense() &&
      fuses(forms, first.packed.layout)) {
    return cuda::fused_layer_sm80(ctx, params);
  }
#endif
  if (!params.attention.out.empty()) attention_combine(ctx, params.attention);
  for (const FusedGemm& gemm : params.gemms) {
    multiply(ctx, gemm);
    if (!gemm.bias.empty()) add_bias(ctx, {.y = gemm.y, .bias = gemm.bias});
    if (gemm.normed.empty()) continue;
    rms_norm(ctx, {.out = gemm.normed,
                   .x = gemm.y,
                   .weight = gemm.norm_weight,
                   .eps = gemm.norm_eps,
                   .weight_offset = gemm.norm_offset});
  }
  if (!params.rotary.qkv.empty()) rotary_kv(ctx, params.rotary);
}

}  // namespace cpmcu
