// score_experts, mask_groups and weigh_experts: the routers that are not a plain softmax.
//
// Roofline: latency. They read and write a few KB in a decode step.
//
// Schedule: score_experts has a thread for each logit. mask_groups has a CTA for each token. A warp
// finds the two largest logits of a group, then a thread of each group counts the better groups.
// weigh_experts has a thread for each token, which adds the token's weights in the order of rank.
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
    mask_groups_kernel(float* logits, int64_t columns, int num_experts, ExpertGroups groups) {
  __shared__ float values[kMaxExperts / 2];
  __shared__ bool is_left[kMaxExperts / 2];
  ptx::pdl_launch();
  const int count = groups.count, size = num_experts / count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const row = logits + blockIdx.x * columns;
  ptx::pdl_wait();
  for (int group = warp; group < count; group += kThreads / 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = lane; i < size; i += 32) {
      const float logit = row[group * size + i];
      second = fmaxf(second, fminf(first, logit));
      first = fmaxf(first, logit);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, first, offset);
      const float next = __shfl_xor_sync(0xffffffffu, second, offset);
      second = fmaxf(fminf(first, other), fmaxf(second, next));
      first = fmaxf(first, other);
    }
    if (lane == 0) values[group] = __fadd_rn(first, second);
  }
  __syncthreads();
  for (int group = threadIdx.x; group < count; group += kThreads) {
    int better = 0;
    for (int i = 0; i < count; ++i) {
      better += values[i] > values[group] || (values[i] == values[group] && i < group);
    }
    is_left[group] = better >= groups.top_k;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    if (is_left[expert / size]) row[expert] = -INFINITY;
  }
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
void mask_groups(const Context& ctx, const MaskGroupsParams& p) {
  check_mask_groups(p);
  if (p.logits.size(0) == 0 || p.groups.count == 1) return;
  launch(ctx, mask_groups_kernel, dim3(p.logits.size(0)), dim3(kThreads), 0, p.logits.as<float>(),
         p.logits.size(1), p.num_experts, p.groups);
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
