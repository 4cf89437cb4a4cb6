// score_experts and weigh_experts: the routers that are not a plain softmax.
//
// Roofline: latency. They read and write a few KB in a decode step.
//
// Schedule: score_experts has a thread for each logit. weigh_experts has a thread for each token,
// which adds the token's weights in the order of rank.
//
// Surprising: logits are overwritten by the scores to choose by, so moe_route needs no other mode.
#include "kernels/moe/route_scores.h"

#include "core/launch.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (T, CTAs of a row).
__global__ void __launch_bounds__(kThreads)
    score_experts_kernel(float* scores, float* logits, int64_t columns, int num_experts,
                         const float* __restrict__ bias) {
  ptx::pdl_launch();
  const int expert = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  ptx::pdl_wait();
  if (expert >= num_experts) return;
  float* const logit = logits + blockIdx.x * columns + expert;
  const float score = 1 / (1 + expf(-*logit));
  scores[int64_t{blockIdx.x} * num_experts + expert] = score;
  *logit = score + (bias == nullptr ? 0.0f : bias[expert]);
}

__global__ void __launch_bounds__(kThreads)
    weigh_experts_kernel(Routing routing, int num_tokens, const float* scores, bool renormalise,
                         float epsilon, float factor, const float* __restrict__ scale) {
  ptx::pdl_launch();
  const int token = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  ptx::pdl_wait();
  if (token >= num_tokens) return;
  const int* const experts = routing.experts + token * routing.top_k;
  float* const weights = routing.weights + token * routing.top_k;
  const auto weight_of = [&](int rank) {
    return scores == nullptr ? weights[rank]
                             : scores[int64_t{token} * routing.num_experts + experts[rank]];
  };
  float sum = epsilon;
  for (int rank = 0; rank < routing.top_k; ++rank) sum = __fadd_rn(sum, weight_of(rank));
  for (int rank = 0; rank < routing.top_k; ++rank) {
    float weight = weight_of(rank);
    if (renormalise) weight = __fdiv_rn(weight, sum);
    weight = __fmul_rn(weight, factor);
    weights[rank] = scale == nullptr ? weight : __fmul_rn(weight, scale[experts[rank]]);
  }
}

}  // namespace

// ---- launchers

// Graph-safe.
void score_experts(const Context& ctx, const ScoreExpertsParams& p) {
  check_score_experts(p);
  if (p.scores.size(0) == 0) return;
  const int num_experts = static_cast<int>(p.scores.size(1));
  const dim3 grid(p.scores.size(0), (num_experts + kThreads - 1) / kThreads);
  launch(ctx, score_experts_kernel, grid, dim3(kThreads), 0, p.scores.as<float>(),
         p.logits.as<float>(), p.logits.size(1), num_experts, p.bias.as<const float>());
}

// Graph-safe.
void weigh_experts(const Context& ctx, const WeighExpertsParams& p) {
  check_weigh_experts(p);
  if (p.num_tokens == 0) return;
  const int num_tokens = static_cast<int>(p.num_tokens);
  launch(ctx, weigh_experts_kernel, dim3((num_tokens + kThreads - 1) / kThreads), dim3(kThreads), 0,
         p.routing, num_tokens, p.scores.as<const float>(), p.renormalise, p.epsilon, p.factor,
         p.scale.as<const float>());
}

}  // namespace cpmcu::cuda
