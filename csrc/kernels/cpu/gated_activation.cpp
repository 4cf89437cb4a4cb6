#include "kernels/layer/gated_activation.h"

#include <algorithm>
#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {
namespace {

float activate(const GatedActivationParams& p, float gate, float up) {
  switch (p.kind) {
    case Activation::kGeluTanh:
      return gate / 2 * (1 + std::tanh(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) *
             up;
    case Activation::kClampedSwiglu: {
      const float g = std::min(gate, p.limit), u = std::clamp(up, -p.limit, p.limit);
      return g / (1 + std::exp(-p.alpha * g)) * (u + 1);
    }
    case Activation::kRelu2:
      return std::max(up, 0.0f) * std::max(up, 0.0f);
    case Activation::kSilu:
      break;
  }
  return gate / (1 + std::exp(-gate)) * up;
}

}  // namespace

void gated_activation(const Context&, const GatedActivationParams& p) {
  check_gated_activation(p);
  const int64_t num_rows = p.out.size(0), width = p.out.size(1);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (num_rows * width > 16384)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* x = p.x.as<T>() + row * p.x.size(1);
      T* out = p.out.as<T>() + row * width;
      const int64_t place = p.order == nullptr ? row : p.order[row];
      const T* bias = p.bias.empty()
                          ? nullptr
                          : p.bias.as<T>() + (p.index == nullptr ? 0 : p.index[place]) * 2 * width;
      const auto value = [&](int64_t at) {
        return to_float(x[at]) + (bias == nullptr ? 0 : to_float(bias[at]));
      };
      if (p.kind == Activation::kRelu2) {
        for (int64_t i = 0; i < width; ++i) out[i] = from_float<T>(activate(p, 0, to_float(x[i])));
        continue;
      }
      if (!p.up.empty()) {
        const T* up = p.up.as<T>() + row * p.up.size(1) + p.first_up;
        for (int64_t i = 0; i < width; ++i) {
          out[i] = from_float<T>(activate(p, to_float(x[i]), to_float(up[i])));
        }
        continue;
      }
      for (int64_t i = 0; i < width; ++i) {
        const int64_t gate = p.alternates ? 2 * i : i, up = p.alternates ? 2 * i + 1 : width + i;
        out[i] = from_float<T>(activate(p, value(gate), value(up)));
      }
    }
  });
}

}  // namespace cpmcu::cpu
