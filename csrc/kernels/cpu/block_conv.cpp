// block_conv (kernels/layer/block_conv.h).
#include "kernels/layer/block_conv.h"

#include <algorithm>

#include "core/half.h"

namespace cpmcu::cpu {

void block_conv(const Context&, const BlockConvParams& p) {
  check_block_conv(p);
  const int64_t num_columns = p.x.size(1), num_groups = num_columns / p.group;
  const int width = static_cast<int>(p.base.size(0));
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const T* base = p.base.as<T>();
    for (int64_t row = 0; row < p.x.size(0); ++row) {
      const T* delta = p.delta.as<T>() + row * p.delta.size(1) + p.first;
      T* out = p.out.as<T>() + row * num_columns;
      const int num_before = std::min(width - 1, static_cast<int>(row % p.num_rows));
      for (int64_t c = 0; c < num_columns; ++c) {
        float sum = 0;
        for (int i = 0; i <= num_before; ++i) {
          const float weight =
              to_float(base[i * num_columns + c]) + to_float(delta[i * num_groups + c / p.group]);
          sum += weight * to_float(p.x.as<T>()[(row - i) * num_columns + c]);
        }
        out[c] = from_float<T>(sum + (p.adds ? to_float(out[c]) : 0));
      }
    }
  });
}

}  // namespace cpmcu::cpu
