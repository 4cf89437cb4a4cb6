// Runs the stages of kernels/sampling/sample.h on one row of logits at a time.
#include "kernels/sampling/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/sampling/philox.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxGumbel = 16.7f;  // above -log(-log(u)) for the largest u that is drawn

// Whether no logit is NaN or +inf.
bool is_sound(const float* z, int vocab_size) {
  int num_wrong = 0;
  for (int i = 0; i < vocab_size; ++i) num_wrong += z[i] < kInfinity ? 0 : 1;
  return num_wrong == 0;
}

float largest(const float* z, int vocab_size) { return *std::max_element(z, z + vocab_size); }

// Writes the log-probabilities of a row, and those of `candidates` unless it is null.
void write_logprobs(const float* z, int vocab_size, int token, const SlotSampling& s,
                    TokenLogprobs& out, TokenCandidates* candidates) {
  const float maximum = largest(z, vocab_size);
  double sum = 0;
  if (maximum > -kInfinity) {
    for (int i = 0; i < vocab_size; ++i) sum += std::exp(z[i] - maximum);
  }
  const auto logprob = [&](int id) {
    return maximum > -kInfinity ? static_cast<float>(z[id] - maximum - std::log(sum)) : -kInfinity;
  };
  out.logprob = logprob(token);
  for (int i = 0; candidates != nullptr && i < kMaxCandidates; ++i) {
    const int id = candidates->ids[i];
    candidates->logprobs[i] = id == kNoToken ? -kInfinity : logprob(id);
  }

  int num_top = std::min(s.num_logprobs, kMaxLogprobs);
  if (s.names_logprobs) {
    for (int i = 0; i < num_top; ++i) {
      out.top_ids[i] = s.logprob_ids[i];
      out.top_logprobs[i] = logprob(s.logprob_ids[i]);
    }
    return;
  }
  num_top = std::min(num_top, vocab_size);
  thread_local std::vector<int> ids;
  ids.resize(vocab_size);
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + num_top, ids.end(),
                    [z](int a, int b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
  for (int i = 0; i < num_top; ++i) {
    out.top_ids[i] = ids[i];
    out.top_logprobs[i] = logprob(ids[i]);
  }
}

void penalize(float* z, int vocab_size, const int* counts, const SlotSampling& s) {
  for (int i = 0; i < vocab_size; ++i) {
    if (counts[i] == 0) continue;
    const int emitted = counts[i] & ~kPromptBit;
    z[i] = z[i] > 0 ? z[i] / s.repetition_penalty : z[i] * s.repetition_penalty;
    if (emitted > 0) z[i] -= s.presence_penalty + s.frequency_penalty * emitted;
  }
}

// The token counts, plus the tokens on the path from the root to this node.
const int* counts_on_path(const SampleParams& p, int row, const int* counts) {
  thread_local std::vector<int> sum;
  const int64_t vocab_size = p.logits.size(1);
  sum.assign(counts, counts + vocab_size);
  const int first = row - row % p.tree_size;
  for (int node = 1; node < p.tree_size; ++node) {
    const int token = p.tree_tokens[first + node];
    const bool on_path = p.tree_masks[row] >> node & 1;
    if (on_path && token >= 0 && token < vocab_size) ++sum[token];
  }
  return sum.data();
}

void apply_mask(float* z, int vocab_size, const uint32_t* mask) {
  for (int i = 0; i < vocab_size; ++i) {
    if ((mask[i / 32] >> (i % 32) & 1) == 0) z[i] = -kInfinity;
  }
}

// Log-probability minus that of the most likely token. `maximum` may be infinite.
float score_of(float z, float maximum, float temperature) {
  return z == maximum ? 0 : (z - maximum) / temperature;
}

// The probability relative to the most likely token, in units of 2^-40.
uint64_t mass(float z, float maximum, float temperature) {
  return std::llround(std::exp(score_of(z, maximum, temperature)) * 0x1p40f);
}

// The smallest logit that passes top-k and top-p.
float keep_from(const float* z, int vocab_size, float maximum, const SlotSampling& s) {
  const bool use_top_k = s.top_k > 0 && s.top_k < vocab_size, use_top_p = s.top_p < 1;
  if (!use_top_k && !use_top_p) return -kInfinity;
  thread_local std::vector<float> sorted;
  sorted.assign(z, z + vocab_size);
  float least = -kInfinity;
  if (use_top_k) {
    std::nth_element(sorted.begin(), sorted.begin() + s.top_k - 1, sorted.end(), std::greater<>());
    least = sorted[s.top_k - 1];
  }
  if (!use_top_p) return least;

  uint64_t total = 0;
  std::erase_if(sorted, [least](float value) { return value < least; });
  for (float value : sorted) total += mass(value, maximum, s.temperature);
  const auto wanted = static_cast<uint64_t>(
      std::ceil(std::max(0.0, static_cast<double>(s.top_p)) * static_cast<double>(total)));
  std::make_heap(sorted.begin(), sorted.end());
  least = sorted.front();
  for (uint64_t sum = mass(least, maximum, s.temperature); sum < wanted;) {
    std::pop_heap(sorted.begin(), sorted.end());
    sorted.pop_back();
    if (sorted.empty()) break;
    least = sorted.front();
    sum += mass(least, maximum, s.temperature);
  }
  return least;
}

// The most likely tokens. `least`: the smallest logit that passes top-k and top-p.
void write_candidates(const float* z, int vocab_size, float least, const SlotSampling& s,
                      TokenCandidates& out) {
  const int count = std::min(vocab_size, kMaxCandidates);
  thread_local std::vector<int> ids;
  ids.resize(vocab_size);
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(),
                    [z](int a, int b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
  const float maximum = z[ids[0]], least_score = s.min_p > 0 ? std::log(s.min_p) : -kInfinity;
  out.num = 0;
  for (int i = 0; i < kMaxCandidates; ++i) {
    const bool exists = i < count && z[ids[i]] > -kInfinity;
    out.ids[i] = exists ? ids[i] : kNoToken;
    if (!exists) continue;
    const float logit = z[ids[i]];
    const bool passes =
        s.temperature == 0
            ? i == 0
            : logit >= least &&
                  (score_of(logit, maximum, s.temperature) >= least_score || logit == maximum);
    out.num += passes ? 1 : 0;
  }
}

// The token with the largest z / T + gumbel that passes the filters. All scores omit the constant
// maximum / T.
int draw(const float* z, int vocab_size, float maximum, float least, int position,
         const SlotSampling& s) {
  const float least_score = s.min_p > 0 ? std::log(s.min_p) : -kInfinity;
  int best = 0;
  float best_score = -kInfinity;
  Philox4 random{};
  int random_group = -1;
  for (int i = 0; i < vocab_size; ++i) {
    const float score = score_of(z[i], maximum, s.temperature);
    if (z[i] < least || (score < least_score && z[i] != maximum)) continue;
    if (score + kMaxGumbel <= best_score) continue;  // no draw can make it the best
    if (i / 4 != random_group) {
      random = sampling_words(s.seed, s.stream, position, i);
      random_group = i / 4;
    }
    const float gumbel = -std::log(-std::log(uniform_from(random.words[i % 4])));
    if (score + gumbel > best_score) {
      best = i;
      best_score = score + gumbel;
    }
  }
  return best;
}

}  // namespace

void sample(const Context&, const SampleParams& p) {
  CHECK(p.logits.dtype() == DType::kF32, "sample: logits are {}, expected float32",
        name_of(p.logits.dtype()));
  CHECK(!p.tree_tokens || (p.tree_masks && p.tree_size >= 1 && p.tree_size <= kMaxTreeSize),
        "sample: trees of {} nodes, expected 1 to {} and their masks", p.tree_size, kMaxTreeSize);
  CHECK(!p.mask_rows || p.masks, "sample: rows name masks, but there are none");
  const int num_rows = static_cast<int>(p.logits.size(0));
  const int vocab_size = static_cast<int>(p.logits.size(1));
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
  for (int row = 0; row < num_rows; ++row) {
    const int64_t slot = p.token_slots[row];
    const SlotSampling& s = p.sampling[slot];
    float* z = p.logits.as<float>() + int64_t{row} * vocab_size;
    TokenCandidates* candidates = p.candidates == nullptr ? nullptr : p.candidates + row;
    if (candidates != nullptr) {
      candidates->num = 0;
      std::fill_n(candidates->ids, kMaxCandidates, kNoToken);
    }
    if (!is_sound(z, vocab_size)) {
      p.tokens[row] = kNoToken;
      continue;
    }
    thread_local std::vector<float> raw;
    if (s.num_logprobs >= 0) raw.assign(z, z + vocab_size);

    if (s.use_penalties) {
      const int* counts = p.counts + slot * vocab_size;
      penalize(z, vocab_size, p.tree_tokens ? counts_on_path(p, row, counts) : counts, s);
    }
    if (s.use_bias) {
      for (int i = 0; i < vocab_size; ++i) z[i] += p.bias[slot * vocab_size + i];
    }
    const bool has_mask = p.mask_rows && p.mask_rows[row] >= 0;
    if (has_mask) {
      apply_mask(z, vocab_size, p.masks + int64_t{p.mask_rows[row]} * num_mask_words(vocab_size));
    }
    const float maximum = largest(z, vocab_size);
    int token = 0;
    if (maximum == -kInfinity && !has_mask) {
      p.tokens[row] = kNoToken;
      continue;
    }
    float least = -kInfinity;
    if (s.temperature == 0) {
      token = static_cast<int>(std::find(z, z + vocab_size, maximum) - z);
    } else if (maximum > -kInfinity) {
      least = keep_from(z, vocab_size, maximum, s);
      token = draw(z, vocab_size, maximum, least, p.token_positions[row] + 1, s);
    }
    p.tokens[row] = token;
    if (candidates != nullptr) write_candidates(z, vocab_size, least, s, *candidates);
    if (s.num_logprobs >= 0) {
      write_logprobs(raw.data(), vocab_size, token, s, p.logprobs[row], candidates);
    }
  }
}

}  // namespace cpmcu::cpu
