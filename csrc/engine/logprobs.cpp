#include "engine/logprobs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/check.h"

namespace cpmcu {

TokenLogprobs token_logprobs(const float* logits, int vocab_size, int token, int num_top) {
  CHECK(token >= 0 && token < vocab_size, "token id {} is outside the vocabulary of {}", token,
        vocab_size);
  CHECK(num_top >= 0 && num_top <= kMaxLogprobs, "{} likeliest tokens were asked for, at most {}",
        num_top, kMaxLogprobs);
  const float largest = *std::max_element(logits, logits + vocab_size);
  double sum = 0;
  for (int i = 0; i < vocab_size; ++i) sum += std::exp(logits[i] - largest);
  const float log_sum = largest + static_cast<float>(std::log(sum));

  TokenLogprobs result{.logprob = logits[token] - log_sum};
  const int count = std::min(num_top, vocab_size);
  if (count == 0) return result;
  std::vector<int> ids(static_cast<size_t>(vocab_size));
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](int a, int b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  for (int i = 0; i < count; ++i) {
    result.top_ids[i] = ids[static_cast<size_t>(i)];
    result.top_logprobs[i] = logits[result.top_ids[i]] - log_sum;
  }
  return result;
}

}  // namespace cpmcu
