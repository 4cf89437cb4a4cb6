// Ops of a LiLiCorr head (kernels/tree/lilicorr.h).
#include <array>

#include "kernels/cpu/lattice_parts.h"
#include "kernels/tree/lilicorr_checks.h"

namespace cpmcu::cpu {
namespace {

using Features = std::array<float, kCandidateFeatures>;

float silu(float x) { return x * sigmoid(x); }
float bounded(float logprob) { return std::max(or_none(logprob), kLeastLogprob); }

void write_row(const Tensor& matrix, int64_t row, const std::vector<float>& values) {
  dispatch_host_dtype(matrix.dtype(), [&](auto t) {
    using T = decltype(t);
    T* const to = matrix.as<T>() + row * matrix.size(1);
    for (size_t i = 0; i < values.size(); ++i) to[i] = from_float<T>(values[i]);
  });
}
std::vector<float> values_of(const Tensor& x) { return row_of(x.view({1, x.num_elements()}), 0); }

void add(std::vector<float>& to, const std::vector<float>& values) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += values[i];
}

Features normed(Features x, const std::vector<float>& weight, const std::vector<float>& bias) {
  float mean = 0, variance = 0;
  for (float value : x) mean += value / kCandidateFeatures;
  for (float value : x) variance += (value - mean) * (value - mean) / kCandidateFeatures;
  const float factor = 1 / std::sqrt(variance + kFeatureNormEps);
  for (size_t i = 0; i < x.size(); ++i) x[i] = (x[i] - mean) * factor * weight[i] + bias[i];
  return x;
}

// Head `head` of row `row` of a third of qkv: 0 is q, 1 is k, 2 is v.
std::vector<float> head_of(const LatticeAttentionParams& p, int third, int64_t row, int head) {
  const int64_t width = p.out.size(1), size = width / p.num_heads;
  const Tensor heads = p.qkv.view({p.size.rows() * 3 * p.num_heads, size});
  return row_of(heads, (row * 3 + third) * p.num_heads + head);
}

// Queries of one head of one sequence.
void attend(const LatticeAttentionParams& p, int seq, int head) {
  const int64_t count = int64_t{p.size.depth} * p.size.topk, first = seq * count;
  const int64_t slots = p.slot_bias.size(1) / 2;
  const std::vector<float> slot_bias = row_of(p.slot_bias, head);
  const float same_bias = values_of(p.same_bias)[static_cast<size_t>(head)];
  std::vector<std::vector<float>> keys, values;
  for (int64_t row = first; row < first + count; ++row) {
    keys.push_back(head_of(p, 1, row, head));
    values.push_back(head_of(p, 2, row, head));
  }
  for (int64_t i = 0; i < count; ++i) {
    const std::vector<float> query = head_of(p, 0, first + i, head);
    std::vector<float> logits, sum(query.size());
    for (int64_t j = 0; j < count; ++j) {
      float dot = 0;
      for (size_t e = 0; e < query.size(); ++e) dot += query[e] * keys[static_cast<size_t>(j)][e];
      const int64_t distance = i / p.size.topk - j / p.size.topk;
      logits.push_back(dot / std::sqrt(static_cast<float>(query.size())) +
                       slot_bias[static_cast<size_t>(distance + slots)] +
                       (distance == 0 ? same_bias : 0));
    }
    const float largest = *std::ranges::max_element(logits);
    float total = 0;
    for (float& logit : logits) total += logit = std::exp(logit - largest);
    for (size_t j = 0; j < logits.size(); ++j) {
      for (size_t e = 0; e < sum.size(); ++e) sum[e] += logits[j] / total * values[j][e];
    }
    const int64_t size = std::ssize(query);
    write_row(p.out.view({p.size.rows() * p.num_heads, size}), (first + i) * p.num_heads + head,
              sum);
  }
}

// `count` values from `first` on, divided by their norm.
std::vector<float> unit(const Tensor& matrix, int64_t row, int64_t first, int64_t count,
                        float eps) {
  const std::vector<float> all = row_of(matrix, row);
  std::vector<float> vector(all.begin() + first, all.begin() + first + count);
  float squares = 0;
  for (float value : vector) squares += value * value;
  for (float& value : vector) value /= std::max(std::sqrt(squares), eps);
  return vector;
}

void score_position(const FactorPairsParams& p, int seq, int depth) {
  const int k = p.size.topk;
  const int64_t size = p.anchors.size(1), row = (int64_t{seq} * p.size.depth + depth) * k;
  for (int a = 0; a < (depth == 0 ? 1 : k); ++a) {
    const std::vector<float> above = depth == 0 ? unit(p.anchors, seq, 0, size, p.eps)
                                                : unit(p.factors, row - k + a, 0, size, p.eps);
    const bool exists = depth == 0 || p.candidates[row - k + a] >= 0;
    std::vector<float> logits(static_cast<size_t>(k), kNone);
    for (int b = 0; exists && b < k; ++b) {
      if (p.candidates[row + b] < 0) continue;
      const std::vector<float> below = unit(p.factors, row + b, size, size, p.eps);
      float dot = 0;
      for (size_t i = 0; i < below.size(); ++i) dot += above[i] * below[i];
      logits[static_cast<size_t>(b)] = or_none(p.scale * dot);
    }
    share_out(logits, 0, 0, p.pairs + (row + a) * k);
  }
}

}  // namespace

void candidate_features(const Context&, const CandidateFeaturesParams& p) {
  check_candidate_features(p);
  const std::vector<float> weight = values_of(p.weight), bias = values_of(p.bias);
  const std::vector<float> norm_weight = values_of(p.norm_weight);
  const std::vector<float> norm_bias = values_of(p.norm_bias);
  const int k = p.size.topk;
  for (int64_t row = 0; row < p.size.rows(); ++row) {
    const int rank = static_cast<int>(row % k);
    float largest = kLeastLogprob;
    for (int i = 0; i < k; ++i) largest = std::max(largest, bounded(p.logprobs[row - rank + i]));
    const float own = bounded(p.logprobs[row]);
    const float place = k > 1 ? static_cast<float>(rank) / static_cast<float>(k - 1) : 0;
    const Features features =
        normed({own, std::exp(own), own - largest, place, rank == 0 ? 1.0f : 0.0f}, norm_weight,
               norm_bias);
    std::vector<float> out = bias;
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t f = 0; f < features.size(); ++f) {
        out[i] += weight[i * features.size() + f] * features[f];
      }
      out[i] = silu(out[i]);
    }
    write_row(p.out, row, out);
  }
}

void candidate_states(const Context&, const CandidateStatesParams& p) {
  check_candidate_states(p);
  for (int64_t row = 0; row < p.size.rows(); ++row) {
    const int64_t position = row / p.size.topk;
    std::vector<float> x = row_of(p.x, row);
    add(x, row_of(p.hidden, position));
    add(x, row_of(p.slots, position % p.size.depth));
    add(x, row_of(p.ranks, row % p.size.topk));
    for (int64_t i = 0; i < p.biases.size(0); ++i) add(x, row_of(p.biases, i));
    write_row(p.x, row, x);
  }
}

void bias_silu(const Context&, const BiasSiluParams& p) {
  check_bias_silu(p);
  const std::vector<float> bias = values_of(p.bias);
  for (int64_t row = 0; row < p.y.size(0); ++row) {
    std::vector<float> y = row_of(p.y, row);
    add(y, bias);
    for (float& value : y) value = silu(value);
    write_row(p.y, row, y);
  }
}

void lattice_attention(const Context&, const LatticeAttentionParams& p) {
  check_lattice_attention(p);
  for (int seq = 0; seq < p.size.num_seqs; ++seq) {
    for (int head = 0; head < p.num_heads; ++head) attend(p, seq, head);
  }
}

void factor_inputs(const Context&, const FactorInputsParams& p) {
  check_factor_inputs(p);
  for (int64_t row = 0; row < p.size.rows(); ++row) {
    const std::vector<float> x = row_of(p.x, row);
    const std::vector<float> anchor = row_of(p.anchors, row / (p.size.depth * p.size.topk));
    std::vector<float> out = x;
    out.insert(out.end(), anchor.begin(), anchor.end());
    for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * anchor[i]);
    write_row(p.out, row, out);
  }
}

void factor_pairs(const Context&, const FactorPairsParams& p) {
  check_factor_pairs(p);
  for (int seq = 0; seq < p.size.num_seqs; ++seq) {
    for (int depth = 0; depth < p.size.depth; ++depth) score_position(p, seq, depth);
  }
}

}  // namespace cpmcu::cpu
