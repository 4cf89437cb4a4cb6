#include "kernels/layer/rms_norm.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void rms_norm(const Context&, const RmsNormParams& p) {
  const int64_t num_rows = p.out.size(0), width = p.x.size(1);
  CHECK(p.out.dtype() == p.x.dtype() && p.weight.dtype() == p.x.dtype(),
        "rms_norm: x is {}, weight {}, out {}; expected one dtype", name_of(p.x.dtype()),
        name_of(p.weight.dtype()), name_of(p.out.dtype()));
  CHECK((p.index || p.x.size(0) == num_rows) && p.out.size(1) == width &&
            p.weight.num_elements() == width,
        "rms_norm: x is {}, weight {}, out {}", p.x.shape_text(), p.weight.shape_text(),
        p.out.shape_text());
  const int64_t out_stride = p.out_stride ? p.out_stride : width;
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const T* weight = p.weight.as<T>();
#pragma omp parallel for if (num_rows * width > 65536)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* x = p.x.as<T>() + (p.index ? p.index[row] : row) * width;
      T* out = p.out.as<T>() + row * out_stride;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
      const float scale = 1 / std::sqrt(sum / width + p.eps);
      for (int64_t i = 0; i < width; ++i) {
        out[i] = from_float<T>(to_float(x[i]) * scale * (to_float(weight[i]) + p.weight_offset));
      }
    }
  });
}

}  // namespace cpmcu::cpu
