#include "kernels/layer/norm_add.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void norm_add(const Context&, const NormAddParams& p) {
  check_norm_add(p);
  const int64_t num_rows = p.x.size(0), width = p.x.size(1);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const T* weight = p.weight.as<T>();
    const float out_scale = p.factor * (p.scale.empty() ? 1 : to_float(*p.scale.as<T>()));
#pragma omp parallel for if (num_rows * width > 65536)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* x = p.x.as<T>() + row * width;
      T* hidden = p.hidden.as<T>() + row * width;
      float sum = 0;
      for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
      const float scale = 1 / std::sqrt(sum / static_cast<float>(width) + p.eps);
      for (int64_t i = 0; i < width; ++i) {
        const float normed = to_float(x[i]) * scale * (to_float(weight[i]) + p.weight_offset);
        hidden[i] = from_float<T>((to_float(hidden[i]) + normed) * out_scale);
      }
    }
  });
}

}  // namespace cpmcu::cpu
