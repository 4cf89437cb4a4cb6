#include "kernels/layer/gated_norm.h"

#include <cmath>
#include <vector>

#include "core/half.h"

namespace cpmcu::cpu {

void gated_norm(const Context&, const GatedNormParams& p) {
  check_gated_norm(p);
  const int64_t num_rows = p.x.size(0), width = p.x.size(1) / p.num_groups;
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (num_rows * p.x.size(1) > 65536)
    for (int64_t row = 0; row < num_rows; ++row) {
      std::vector<float> values(static_cast<size_t>(width));
      for (int group = 0; group < p.num_groups; ++group) {
        const int64_t first = group * width;
        const T* x = p.x.as<T>() + row * p.x.size(1) + first;
        const T* gate = p.gate.as<T>() + row * p.gate.size(1) + p.first_gate + first;
        const T* weight = p.weight.as<T>() + first;
        T* out = p.out.as<T>() + row * p.x.size(1) + first;
        float sum = 0;
        for (int64_t i = 0; i < width; ++i) {
          const float z = to_float(gate[i]);
          float& v = values[static_cast<size_t>(i)];
          v = to_float(x[i]) * (z / (1 + std::exp(-z)));
          sum += v * v;
        }
        const float scale = 1 / std::sqrt(sum / static_cast<float>(width) + p.eps);
        for (int64_t i = 0; i < width; ++i) {
          out[i] = from_float<T>(to_float(weight[i]) * (values[static_cast<size_t>(i)] * scale));
        }
      }
    }
  });
}

}  // namespace cpmcu::cpu
