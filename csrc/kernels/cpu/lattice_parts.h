// Parts that lattices and trees of a recurrent network share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/half.h"
#include "core/tensor.h"

namespace cpmcu::cpu {

constexpr float kNone = -std::numeric_limits<float>::infinity();

inline float or_none(float score) { return std::isnan(score) ? kNone : score; }
inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// The first `columns` values (0: all) of row `row` of a matrix as float32, or zeros if the row is
// negative.
inline std::vector<float> row_of(const Tensor& matrix, int64_t row, int64_t columns = 0) {
  if (columns == 0) columns = matrix.size(1);
  std::vector<float> values(static_cast<size_t>(columns));
  if (row < 0) return values;
  dispatch_host_dtype(matrix.dtype(), [&](auto t) {
    const auto* from = matrix.as<decltype(t)>() + row * matrix.size(1);
    for (int64_t i = 0; i < columns; ++i) values[static_cast<size_t>(i)] = to_float(from[i]);
  });
  return values;
}

// The corrections of candidates (kernels/tree/gru_chain.h): dot products of their rows of the
// successors and silu(fixed + moving).
inline std::vector<float> corrections_of(const int* candidates, int topk, const Tensor& successors,
                                         const std::vector<float>& fixed,
                                         const std::vector<float>& moving) {
  std::vector<float> hidden, dots(static_cast<size_t>(topk));
  for (size_t i = 0; i < fixed.size(); ++i) {
    const float x = fixed[i] + moving[i];
    hidden.push_back(x * sigmoid(x));
  }
  for (int b = 0; b < topk; ++b) {
    const std::vector<float> successor = row_of(successors, candidates[b]);
    for (size_t i = 0; i < hidden.size(); ++i) {
      dots[static_cast<size_t>(b)] += hidden[i] * successor[i];
    }
  }
  return dots;
}

// The log-probabilities of a position's candidates, kNone for missing ones, and the sum of their
// probabilities.
struct CandidateLogprobs {
  std::vector<float> values;
  float mass = 0;

  CandidateLogprobs(const int* candidates, const float* logprobs, int topk) {
    for (int b = 0; b < topk; ++b) {
      values.push_back(candidates[b] < 0 ? kNone : or_none(logprobs[b]));
      mass += std::exp(values.back());
    }
  }
  // The probability of all other tokens.
  float rest() const { return std::max(1 - mass, 0.0f); }
  // The logit of candidate b, to which a head adds `more`.
  float logit(size_t b, float more) const {
    return values[b] == kNone ? kNone : or_none(values[b] + more);
  }
};

// The scores of K candidates below one parent: the log-softmax of `logits`, with `rest` beside the
// candidates, plus `more`.
inline void share_out(const std::vector<float>& logits, float rest, float more, float* scores) {
  float largest = rest > 0 ? std::log(rest) : kNone;
  for (float logit : logits) largest = std::max(largest, logit);
  float sum = rest > 0 ? rest * std::exp(-largest) : 0;
  for (float logit : logits) sum += logit == kNone ? 0 : std::exp(logit - largest);
  for (size_t b = 0; b < logits.size(); ++b) {
    scores[b] = logits[b] == kNone ? kNone : logits[b] - largest - std::log(sum) + more;
  }
}

}  // namespace cpmcu::cpu
