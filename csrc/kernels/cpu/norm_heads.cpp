#include "kernels/layer/norm_heads.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void norm_heads(const Context&, const NormHeadsParams& p) {
  check_norm_heads(p);
  const int64_t num_rows = p.x.size(0), row_width = p.x.size(1);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const T* weight = p.weight.empty() ? nullptr : p.weight.as<T>();
#pragma omp parallel for if (num_rows * row_width > 65536)
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int group = 0; group < p.num_groups; ++group) {
        T* x = p.x.as<T>() + row * row_width + p.first + int64_t{group} * p.width;
        float sum = 0;
        for (int i = 0; i < p.width; ++i) sum += to_float(x[i]) * to_float(x[i]);
        const float scale = 1 / std::sqrt(sum / static_cast<float>(p.width) + p.eps);
        for (int i = 0; i < p.width; ++i) {
          const float factor = weight == nullptr ? 1 : to_float(weight[i]) + p.weight_offset;
          x[i] = from_float<T>(to_float(x[i]) * scale * factor);
        }
      }
    }
  });
}

}  // namespace cpmcu::cpu
