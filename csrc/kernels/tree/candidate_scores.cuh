// Scores of the candidates of a position below one parent, for kernels in which a warp has a
// candidate (gru_chain.cu, gru_tree.cu, rnn_tree.cu).
#pragma once

#include <cmath>

#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"

namespace cpmcu::cuda {
namespace {

constexpr float kNone = -INFINITY;  // the score of a candidate that is never drafted

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The correction of a candidate (gru_chain.h): the dot product of its row of the successors and
// silu(fixed + moving), rows of `width` values. For a whole warp; each lane gets it.
template <typename T>
__device__ __forceinline__ float correction_of(const T* successor, const float* fixed,
                                               const float* moving, int width) {
  float dot = 0;
  for (int i = 8 * (threadIdx.x % 32); i < width; i += 8 * 32) {
    const auto eight = load<T, 8>(successor + i);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float x = fixed[i + e] + moving[i + e];
      dot += to_float(eight[e]) * x * sigmoid(x);
    }
  }
  return warp_reduce(dot, Sum{});
}

// The logit of a lane's candidate, and what all lanes subtract for log-probabilities. Tokens that
// are no candidates keep the rest of the probability.
struct CandidateLogit {
  float logit;         // kNone: the lane has no candidate
  float largest, sum;  // log-probability = logit - largest - log(sum)

  __device__ __forceinline__ float logprob() const {
    return logit == kNone ? kNone : logit - largest - logf(sum);
  }
};

// Lane b has candidate b < topk, whose log-probability is corrected by corrections[b]; null: by
// nothing. For a whole warp.
__device__ __forceinline__ CandidateLogit logit_of_lane(const int* candidates,
                                                        const float* logprobs, int topk,
                                                        const float* corrections) {
  const int lane = threadIdx.x % 32;
  const bool exists = lane < topk && candidates[lane] >= 0;
  float logprob = exists ? logprobs[lane] : kNone;
  if (isnan(logprob)) logprob = kNone;
  const float rest = fmaxf(1.0f - warp_reduce(expf(logprob), Sum{}), 0.0f);
  float logit = logprob;
  if (logprob != kNone && corrections != nullptr) logit += corrections[lane];
  if (isnan(logit)) logit = kNone;
  const float largest = fmaxf(warp_reduce(logit, Max{}), rest > 0 ? logf(rest) : kNone);
  const float sum = warp_reduce(logit == kNone ? 0.0f : expf(logit - largest), Sum{}) +
                    (rest > 0 ? rest * expf(-largest) : 0.0f);
  return {logit, largest, sum};
}

}  // namespace
}  // namespace cpmcu::cuda
