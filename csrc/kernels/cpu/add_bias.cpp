#include "kernels/layer/add_bias.h"

#include "core/half.h"

namespace cpmcu::cpu {

void add_bias(const Context&, const AddBiasParams& p) {
  check_add_bias(p);
  const int64_t num_rows = p.y.size(0), width = p.y.size(1);
  dispatch_host_dtype(p.y.dtype(), [&](auto y_element) {
    dispatch_host_dtype(p.bias.dtype(), [&](auto element) {
      using Y = decltype(y_element);
      using T = decltype(element);
      for (int64_t row = 0; row < num_rows; ++row) {
        Y* y = p.y.as<Y>() + row * width;
        const T* bias = p.bias.as<T>() + (p.index == nullptr ? 0 : p.index[row]) * width;
        for (int64_t i = 0; i < width; ++i)
          y[i] = from_float<Y>(to_float(y[i]) + to_float(bias[i]));
      }
    });
  });
}

}  // namespace cpmcu::cpu
