// Routers other than a softmax of x W^T. They have these parameters of a moe block:
//
//   router_bias       logits = x W^T + b
//   router_norm       x is the residual stream. The router reads an RMSNorm of it, and its logits
//                     are divided by √H; the experts read another RMSNorm
//   scoring           softmax, or sigmoid: the weights are sigmoid(logits)
//   correction_bias   sigmoid only: added to the scores that choose experts, not to their weights
//   norm_epsilon      sigmoid only: added to the sum that norm_topk_prob divides by
//   num_expert_groups, top_k_groups
//                     sigmoid only: experts are chosen from the best groups (mask_groups)
//   routing_factor    multiplies the weights
//   expert_scale      a factor of each expert's weight
//
// Without them, or with router_bias alone, one launch computes logits and routing
// (kernels/moe/moe_router.h).
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "core/params.h"
#include "kernels/gemm/gemm.h"
#include "kernels/layer/add_bias.h"
#include "kernels/moe/route_scores.h"
#include "layers/norm.h"

namespace cpmcu {

class Router {
 public:
  // `mlp`: the prefix of the block's tensors.
  Router(const ModelSpec& spec, const Params& params, const std::string& mlp)
      : spec_(&spec),
        mlp_(mlp),
        num_experts_(params.integer("num_experts", 0)),
        renormalise_(params.flag("norm_topk_prob", true)),
        biased_(params.flag("router_bias", false)),
        norms_(params.flag("router_norm", false)),
        corrects_(params.flag("correction_bias", false)),
        scales_(params.flag("expert_scale", false)),
        epsilon_(params.number("norm_epsilon", 0)),
        factor_(params.number("routing_factor", 1)),
        groups_{params.integer("num_expert_groups", 1), params.integer("top_k_groups", 1)},
        router_norm_(spec, mlp + "router_norm", 0, true),
        experts_norm_(spec, mlp + "experts_norm", 0, true) {
    const std::string scoring = params.text("scoring", "softmax");
    CHECK(scoring == "softmax" || scoring == "sigmoid",
          "a moe block has the scoring \"{}\", expected softmax or sigmoid", scoring);
    sigmoid_ = scoring == "sigmoid";
    CHECK(sigmoid_ || (!corrects_ && epsilon_ == 0),
          "a moe block has a correction_bias or norm_epsilon, expected it only with sigmoid");
    check_expert_groups(groups_, num_experts_, params.integer("top_k", 0));
    CHECK(sigmoid_ || groups_.count == 1,
          "a moe block has {} groups of experts, expected them only with sigmoid", groups_.count);
    CHECK(epsilon_ >= 0 && factor_ > 0,
          "a moe block has norm_epsilon {} and routing_factor {}, expected at least 0 and above 0",
          epsilon_, factor_);
  }

  bool is_plain() const { return !biased_ && is_one_launch(); }
  bool is_one_launch() const { return !norms_ && !sigmoid_ && !scales_ && factor_ == 1; }
  const Tensor& bias() const { return bias_; }  // [1, E]; empty: none
  bool norms_input() const { return norms_; }

  void plan(MemoryPlan& plan, int64_t max_tokens, Timeline phase) {
    const int64_t row = int64_t{spec_->hidden_size} * size_of(spec_->dtype);
    max_tokens_ = max_tokens;
    if (biased_) {
      bias_id_ = plan.add(mlp_ + "gate.bias", "weights", num_experts_ * size_of(spec_->dtype));
    }
    if (norms_) {
      router_norm_.plan(plan);
      experts_norm_.plan(plan);
      router_x_id_ = plan.add_scratch("moe.router_x", max_tokens * row, phase + 1, phase + 3);
      experts_x_id_ = plan.add_scratch("moe.experts_x", max_tokens * row, phase + 1, phase + 3);
    }
    if (sigmoid_) {
      scores_id_ =
          plan.add_scratch("moe.scores", 4 * max_tokens * num_experts_, phase + 1, phase + 3);
    }
    if (corrects_) {
      correction_id_ = plan.add(mlp_ + "gate.correction", "weights", int64_t{4} * num_experts_);
    }
    if (scales_) scale_id_ = plan.add(mlp_ + "expert_scale", "weights", int64_t{4} * num_experts_);
  }
  void bind(const Arena& arena) {
    const int64_t hidden = spec_->hidden_size, experts = num_experts_;
    if (biased_) bias_ = arena.tensor(bias_id_, spec_->dtype, {1, experts});
    if (norms_) {
      router_norm_.bind(arena);
      experts_norm_.bind(arena);
      router_x_ = arena.tensor(router_x_id_, spec_->dtype, {max_tokens_, hidden});
      experts_x_ = arena.tensor(experts_x_id_, spec_->dtype, {max_tokens_, hidden});
    }
    if (sigmoid_) scores_ = arena.tensor(scores_id_, DType::kF32, {max_tokens_, experts});
    if (corrects_) correction_ = arena.tensor(correction_id_, DType::kF32, {experts});
    if (scales_) scale_ = arena.tensor(scale_id_, DType::kF32, {experts});
  }
  void list_tensors(WeightTable& table) {
    if (biased_) table.add(mlp_ + "gate.bias", bias_.view({num_experts_}));
    if (norms_) {
      router_norm_.list_tensors(table);
      experts_norm_.list_tensors(table);
    }
    if (corrects_) table.add(mlp_ + "gate.correction_bias", correction_);
    if (scales_) table.add(mlp_ + "expert_scale", scale_);
  }

  // Appends the norm of the block's input x that the experts read. With router_norm only.
  Value append_experts_norm(OpList& ops, const Value& x) const {
    const Value out = ops.value("moe.experts_x", experts_x_);
    ops.call(
        mlp_ + "experts_norm", {x}, {out},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          normed(ctx, experts_norm_, experts_x_, rows(x));
        },
        experts_norm_.weight().num_bytes());
    return out;
  }
  // Writes logits [T, E] and the routing of the block's input x. `w` [E, H].
  void route(const Context& ctx, const Tensor& logits, const Tensor& x, const Tensor& w,
             const Routing& routing) const {
    const float alpha = norms_ ? 1 / std::sqrt(static_cast<float>(spec_->hidden_size)) : 1;
    const Tensor input = norms_ ? normed(ctx, router_norm_, router_x_, x) : x;
    const Tensor scores = sigmoid_ ? scores_.rows(0, x.size(0)) : Tensor();
    skinny_gemm(ctx, {.y = logits, .x = input, .w = w, .alpha = alpha});
    if (biased_) add_bias(ctx, {.y = logits, .bias = bias_});
    if (sigmoid_) score_experts(ctx, {.scores = scores, .logits = logits, .bias = correction_});
    if (groups_.top_k < groups_.count) {
      mask_groups(ctx, {.logits = logits, .num_experts = num_experts_, .groups = groups_});
    }
    moe_route(ctx, {.logits = logits, .renormalise = sigmoid_ || renormalise_, .routing = routing});
    if (!sigmoid_ && !scales_ && factor_ == 1) return;
    weigh_experts(ctx, {.routing = routing,
                        .num_tokens = x.size(0),
                        .scores = scores,
                        .renormalise = sigmoid_ && renormalise_,
                        .epsilon = epsilon_,
                        .factor = factor_,
                        .scale = scale_});
  }

 private:
  Tensor normed(const Context& ctx, const RmsNorm& norm, const Tensor& to, const Tensor& x) const {
    const Tensor out = to.rows(0, x.size(0));
    rms_norm(ctx, {.out = out, .x = x, .weight = norm.weight(), .eps = spec_->rms_norm_eps});
    return out;
  }

  const ModelSpec* spec_;
  std::string mlp_;
  int num_experts_;
  bool renormalise_, biased_, norms_, sigmoid_ = false, corrects_, scales_;
  float epsilon_, factor_;
  ExpertGroups groups_;
  RmsNorm router_norm_, experts_norm_;  // used only with router_norm
  MemoryPlan::Id bias_id_ = 0, router_x_id_ = 0, experts_x_id_ = 0, scores_id_ = 0,
                 correction_id_ = 0, scale_id_ = 0;
  int64_t max_tokens_ = 0;
  Tensor bias_;                  // [1, E]: router_bias
  Tensor router_x_, experts_x_;  // [T, H]: the normed x, with router_norm
  Tensor scores_;                // [T, E] float32: sigmoid(logits)
  Tensor correction_, scale_;    // [E] float32: correction_bias, and a factor for each expert
};

}  // namespace cpmcu
