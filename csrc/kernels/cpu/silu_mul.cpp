#include "kernels/layer/silu_mul.h"

#include <cmath>

#include "core/half.h"

namespace cpmcu::cpu {

void silu_mul(const Context&, const SiluMulParams& p) {
  const int64_t num_rows = p.out.size(0), width = p.out.size(1);
  CHECK(p.out.dtype() == p.x.dtype() && p.x.size(0) == num_rows && p.x.size(1) == 2 * width,
        "silu_mul: x is {} {}, out {} {}; expected twice as many columns in x",
        name_of(p.x.dtype()), p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  CHECK(!p.interleaved || width % 8 == 0,
        "silu_mul: interleaved with {} columns, expected a multiple of 8", width);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (num_rows * width > 16384)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* x = p.x.as<T>() + row * 2 * width;
      T* out = p.out.as<T>() + row * width;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t gate = p.interleaved ? i + i / 8 * 8 : i;
        const int64_t up = p.interleaved ? gate + 8 : width + i;
        const float a = to_float(x[gate]);
        out[i] = from_float<T>(a / (1 + std::exp(-a)) * to_float(x[up]));
      }
    }
  });
}

}  // namespace cpmcu::cpu
