#include "kernels/layer/scale_queries.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void scale_queries(const Context&, const ScaleQueriesParams& p) {
  const QkvLayout layout = check_scale_queries(p);
  dispatch_host_dtype(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
    for (int64_t row = 0; row < p.qkv.size(0); ++row) {
      const int times = p.positions[row] / p.length;
      if (times == 0) continue;
      const float scale = 1 + p.beta * std::log(1 + static_cast<float>(times));
      for (int h = 0; h < p.num_heads; ++h) {
        T* q = p.qkv.as<T>() + row * layout.row + int64_t{h} * layout.q_head;
        for (int i = 0; i < p.head_dim; ++i) q[i] = from_float<T>(to_float(q[i]) * scale);
      }
    }
  });
}

}  // namespace cpmcu::cpu
