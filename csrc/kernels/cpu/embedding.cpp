#include "kernels/layer/embedding.h"

#include "core/half.h"

namespace cpmcu::cpu {

void embedding(const Context&, const EmbeddingParams& p) {
  CHECK(p.table.dtype() == p.out.dtype() && p.table.size(1) == p.out.size(1),
        "embedding: the table is {} {} but the output {} {}", name_of(p.table.dtype()),
        p.table.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  dispatch_host_dtype(p.out.dtype(), [&](auto t) {
    using T = decltype(t);
    const int64_t num_rows = p.out.size(0), width = p.out.size(1), vocab_size = p.table.size(0);
    const int64_t out_stride = p.out_stride ? p.out_stride : width;
#pragma omp parallel for if (num_rows * width > 65536)
    for (int64_t row = 0; row < num_rows; ++row) {
      const int id = p.ids[row];
      const T* in = p.table.as<T>() + (id >= 0 && id < vocab_size ? id : 0) * width;
      T* out = p.out.as<T>() + row * out_stride;
      for (int64_t i = 0; i < width; ++i) out[i] = from_float<T>(to_float(in[i]) * p.scale);
    }
  });
}

}  // namespace cpmcu::cpu
