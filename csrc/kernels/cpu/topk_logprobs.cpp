#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/tree/tree_checks.h"

namespace cpmcu::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

// Infinities are replaced by the largest finite numbers, so no difference is NaN.
float finite(float z) { return std::isnan(z) ? -kLargest : std::clamp(z, -kLargest, kLargest); }

}  // namespace

void topk_logprobs(const Context&, const TopkLogprobsParams& p) {
  check_topk(p);
  const int num_rows = static_cast<int>(p.logits.size(0));
  const int vocab_size = static_cast<int>(p.logits.size(1));
#pragma omp parallel for if (num_rows > 1)
  for (int row = 0; row < num_rows; ++row) {
    thread_local std::vector<float> z;
    thread_local std::vector<int> ids;
    const float* logits = p.logits.as<float>() + int64_t{row} * vocab_size;
    z.resize(vocab_size);
    ids.resize(vocab_size);
    std::transform(logits, logits + vocab_size, z.begin(), finite);
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + p.topk, ids.end(),
                      [](int a, int b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
    const float maximum = z[ids[0]];
    double sum = 0;
    for (float value : z) sum += std::exp(value - maximum);
    const float log_sum = static_cast<float>(std::log(sum));
    for (int i = 0; i < p.topk; ++i) {
      const int id = ids[i];
      p.tokens[row * p.topk + i] = p.id_map ? p.id_map[id] : id;
      p.logprobs[row * p.topk + i] = z[id] <= -kLargest ? -kInfinity : z[id] - maximum - log_sum;
    }
  }
}

}  // namespace cpmcu::cpu
