// Routers other than a plain softmax: ops around moe_route.
//
//   score_experts   scores = sigmoid(logits); logits = scores + bias, by which moe_route chooses
//   mask_groups     logits of all but the best groups = -infinity. A group has consecutive
//                   experts. Its value is the sum of its two largest logits. If two groups have
//                   equal values, the first is better
//   weigh_experts   weight of a pair = factor * scale[expert] * w
//
// w is the score of the pair's expert, with `renormalise` divided by epsilon + the sum over the
// token's experts. Without scores, w is the weight of moe_route. All in float32.
#pragma once

#include "kernels/moe/moe_route.h"

namespace cpmcu {

struct ScoreExpertsParams {
  Tensor scores;  // [T, E] float32, output
  Tensor logits;  // [T, columns] float32, in place; the first E columns are the experts
  Tensor bias{};  // [E] float32; empty: none
};

// The experts form `count` groups of equal size. A token's experts come from its best `top_k`
// groups.
struct ExpertGroups {
  int count = 1, top_k = 1;
};

struct MaskGroupsParams {
  Tensor logits;  // [T, columns] float32, in place; the first num_experts columns are the experts
  int num_experts = 0;
  ExpertGroups groups{};
};

struct WeighExpertsParams {
  Routing routing;  // its weights change in place
  int64_t num_tokens = 0;
  Tensor scores{};  // [T, E] float32; empty: the weights are those that moe_route wrote
  bool renormalise = false;
  float epsilon = 0;
  float factor = 1;
  Tensor scale{};  // [E] float32 factors; empty: 1
};

inline void check_score_experts(const ScoreExpertsParams& p) {
  CHECK(p.scores.num_dims() == 2 && p.logits.num_dims() == 2 && p.scores.dtype() == DType::kF32 &&
            p.logits.dtype() == DType::kF32 && p.logits.size(0) == p.scores.size(0) &&
            p.logits.size(1) >= p.scores.size(1) &&
            (p.bias.empty() ||
             (p.bias.dtype() == DType::kF32 && p.bias.num_elements() == p.scores.size(1))),
        "score_experts: scores {} {}, logits {} {} and bias {} {} do not fit, expected float32",
        name_of(p.scores.dtype()), p.scores.shape_text(), name_of(p.logits.dtype()),
        p.logits.shape_text(), name_of(p.bias.dtype()), p.bias.shape_text());
}

// Checks that `top_k` experts can be chosen.
inline void check_expert_groups(const ExpertGroups& groups, int num_experts, int top_k) {
  const int count = groups.count;
  CHECK(count >= 1 && num_experts % count == 0 && (count == 1 || num_experts / count >= 2) &&
            groups.top_k >= 1 && groups.top_k <= count &&
            num_experts / count * groups.top_k >= top_k,
        "a router chooses {} of {} experts from {} of {} groups, expected groups of equally many "
        "experts, two or more, with enough of them",
        top_k, num_experts, groups.top_k, count);
}

inline void check_mask_groups(const MaskGroupsParams& p) {
  check_expert_groups(p.groups, p.num_experts, 1);
  CHECK(p.logits.num_dims() == 2 && p.logits.dtype() == DType::kF32 &&
            p.logits.size(1) >= p.num_experts && p.num_experts <= kMaxExperts,
        "mask_groups: logits are {} {}, expected float32 rows of at least {}, at most {} of them "
        "experts",
        name_of(p.logits.dtype()), p.logits.shape_text(), p.num_experts, kMaxExperts);
}

inline void check_weigh_experts(const WeighExpertsParams& p) {
  check_routing(p.routing);
  const auto fits = [&](const Tensor& tensor, int64_t count) {
    return tensor.empty() || (tensor.dtype() == DType::kF32 && tensor.num_elements() == count);
  };
  CHECK(fits(p.scores, p.num_tokens * p.routing.num_experts) &&
            fits(p.scale, p.routing.num_experts) && p.epsilon >= 0,
        "weigh_experts: scores {} {}, scale {} {} and epsilon {} do not fit {} tokens and {} "
        "experts, expected float32 and at least 0",
        name_of(p.scores.dtype()), p.scores.shape_text(), name_of(p.scale.dtype()),
        p.scale.shape_text(), p.epsilon, p.num_tokens, p.routing.num_experts);
}

REGISTER_OP(score_experts, ScoreExpertsParams)
REGISTER_OP(mask_groups, MaskGroupsParams)
REGISTER_OP(weigh_experts, WeighExpertsParams)

}  // namespace cpmcu
