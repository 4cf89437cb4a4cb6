#include "kernels/moe/moe_route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace cpmcu::cpu {
namespace {

// The experts of one token by rank, and their weights.
void route_token(const float* logits, const Routing& routing, bool renormalise, int* experts,
                 float* weights) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int e = 0; e < routing.num_experts; ++e) largest = std::fmax(largest, logits[e]);
  float sum = 0;
  for (int e = 0; e < routing.num_experts; ++e) sum += std::exp(logits[e] - largest);
  std::vector<bool> chosen(static_cast<size_t>(routing.num_experts));
  float chosen_sum = 0;
  for (int rank = 0; rank < routing.top_k; ++rank) {
    int best = -1;
    for (int e = 0; e < routing.num_experts; ++e) {
      if (chosen[static_cast<size_t>(e)]) continue;
      // Any number wins over a NaN.
      const bool wins = best < 0 || logits[e] > logits[best] ||
                        (std::isnan(logits[best]) && !std::isnan(logits[e]));
      if (wins) best = e;
    }
    chosen[static_cast<size_t>(best)] = true;
    experts[rank] = best;
    weights[rank] = std::exp(logits[best] - largest);
    chosen_sum += weights[rank];
  }
  for (int rank = 0; rank < routing.top_k; ++rank) weights[rank] /= renormalise ? chosen_sum : sum;
}

}  // namespace

void moe_route(const Context&, const MoeRouteParams& p) {
  check_moe_route(p);
  const Routing& routing = p.routing;
  const int64_t num_tokens = p.logits.size(0);
  const int num_pairs = static_cast<int>(num_tokens * routing.top_k);
#pragma omp parallel for if (num_tokens * p.logits.size(1) > 16384)
  for (int64_t t = 0; t < num_tokens; ++t) {
    route_token(p.logits.as<float>() + t * p.logits.size(1), routing, p.renormalise,
                routing.experts + t * routing.top_k, routing.weights + t * routing.top_k);
  }
  std::vector<int> next(static_cast<size_t>(routing.num_experts) + 1);
  for (int pair = 0; pair < num_pairs; ++pair) {
    ++next[static_cast<size_t>(routing.experts[pair]) + 1];
  }
  *routing.num_active = 0;
  for (int e = 0; e < routing.num_experts; ++e) {
    const auto at = static_cast<size_t>(e);
    const int count = next[at + 1];
    if (count > 0) {
      routing.spans[*routing.num_active] = {e, next[at], count, -1};
      routing.active[(*routing.num_active)++] = e;
    }
    next[at + 1] += next[at];
    routing.offsets[e] = next[at];
  }
  for (int i = *routing.num_active; i < std::min(routing.num_experts, num_pairs); ++i) {
    routing.spans[i] = {0, 0, 0, -1};
  }
  routing.offsets[routing.num_experts] = num_pairs;
  for (int pair = 0; pair < num_pairs; ++pair) {
    routing.pairs[next[static_cast<size_t>(routing.experts[pair])]++] = pair;
  }
}

}  // namespace cpmcu::cpu
