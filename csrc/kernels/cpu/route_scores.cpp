#include "kernels/moe/route_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace cpmcu::cpu {

void score_experts(const Context&, const ScoreExpertsParams& p) {
  check_score_experts(p);
  const int64_t num_experts = p.scores.size(1), columns = p.logits.size(1);
  const float* bias = p.bias.as<float>();
  for (int64_t t = 0; t < p.scores.size(0); ++t) {
    float* logits = p.logits.as<float>() + t * columns;
    float* scores = p.scores.as<float>() + t * num_experts;
    for (int64_t e = 0; e < num_experts; ++e) {
      scores[e] = 1 / (1 + std::exp(-logits[e]));
      logits[e] = scores[e] + (bias == nullptr ? 0 : bias[e]);
    }
  }
}

void mask_groups(const Context&, const MaskGroupsParams& p) {
  check_mask_groups(p);
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const int count = p.groups.count, size = p.num_experts / count;
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t t = 0; t < p.logits.size(0); ++t) {
    float* logits = p.logits.as<float>() + t * p.logits.size(1);
    for (int group = 0; group < count; ++group) {
      float first = kLowest, second = kLowest;
      for (int i = 0; i < size; ++i) {
        const float logit = logits[group * size + i];
        second = std::max(second, std::min(first, logit));
        first = std::max(first, logit);
      }
      values[static_cast<size_t>(group)] = first + second;
    }
    for (int group = 0; group < count; ++group) {
      const float own = values[static_cast<size_t>(group)];
      int better = 0;
      for (int i = 0; i < count; ++i) {
        const float other = values[static_cast<size_t>(i)];
        better += other > own || (other == own && i < group);
      }
      if (better >= p.groups.top_k) std::fill_n(logits + group * size, size, kLowest);
    }
  }
}

void weigh_experts(const Context&, const WeighExpertsParams& p) {
  check_weigh_experts(p);
  const int top_k = p.routing.top_k;
  const float* scale = p.scale.as<float>();
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int* experts = p.routing.experts + t * top_k;
    float* weights = p.routing.weights + t * top_k;
    if (!p.scores.empty()) {
      const float* scores = p.scores.as<float>() + t * p.routing.num_experts;
      for (int rank = 0; rank < top_k; ++rank) weights[rank] = scores[experts[rank]];
    }
    float sum = p.epsilon;
    for (int rank = 0; rank < top_k; ++rank) sum += weights[rank];
    for (int rank = 0; rank < top_k; ++rank) {
      if (p.renormalise) weights[rank] /= sum;
      weights[rank] *= p.factor;
      if (scale != nullptr) weights[rank] *= scale[experts[rank]];
    }
  }
}

}  // namespace cpmcu::cpu
