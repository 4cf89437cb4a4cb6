#include "kernels/moe/moe_combine.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void moe_combine(const Context& ctx, const MoeCombineParams& p) {
  check_moe_combine(p);
  const int64_t num_tokens = p.hidden.size(0), width = p.hidden.size(1);
  const int top_k = p.routing.top_k;
  dispatch_host_dtype(p.hidden.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (num_tokens * width > 16384)
    for (int64_t token = 0; token < num_tokens; ++token) {
      T* hidden = p.hidden.as<T>() + token * width;
      const float* weights = p.routing.weights + token * top_k;
      const float* y = p.y.as<float>() + token * top_k * width;
      const T* bias = p.bias.empty() ? nullptr : p.bias.as<T>();
      const int* experts = p.routing.experts + token * top_k;
      float share = 0;
      const float* shared = nullptr;
      if (!p.shared.empty()) {
        shared = p.shared.as<float>() + token * width;
        share = p.shared_gate.as<float>()[token * p.shared_gate.size(1) + p.gate_column];
        share = 1 / (1 + std::exp(-share));
      }
      for (int64_t i = 0; i < width; ++i) {
        float sum = 0;
        for (int rank = 0; rank < top_k; ++rank) {
          const float added = bias == nullptr ? 0 : to_float(bias[experts[rank] * width + i]);
          sum += weights[rank] * (y[rank * width + i] + added);
        }
        if (shared != nullptr) sum += share * shared[i];
        hidden[i] = from_float<T>(to_float(hidden[i]) + p.scale * sum);
      }
    }
  });
  if (!p.norm.out.empty()) cpu::rms_norm(ctx, p.norm);
}

}  // namespace cpmcu::cpu
