#include "kernels/layer/sigmoid_gate.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void sigmoid_gate(const Context&, const SigmoidGateParams& p) {
  check_sigmoid_gate(p);
  const int64_t num_rows = p.x.size(0), width = p.x.size(1);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (num_rows * width > 16384)
    for (int64_t row = 0; row < num_rows; ++row) {
      T* x = p.x.as<T>() + row * width;
      const T* gates = p.gates.as<T>() + row * p.gates.size(1) + p.first;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t element = p.of_heads ? 0 : i % p.head_dim;
        const float gate = to_float(gates[i / p.head_dim * p.stride + element]);
        x[i] = from_float<T>(to_float(x[i]) / (1 + std::exp(-gate)));
      }
    }
  });
}

}  // namespace cpmcu::cpu
