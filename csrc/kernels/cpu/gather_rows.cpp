#include "kernels/layer/gather_rows.h"

#include <cstring>

namespace cpmcu::cpu {

void gather_rows(const Context&, const GatherRowsParams& p) {
  CHECK(p.x.dtype() == p.out.dtype() && p.x.size(1) == p.out.size(1),
        "gather_rows: the input is {} {} but the output {} {}", name_of(p.x.dtype()),
        p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  const int64_t item_bytes = size_of(p.x.dtype());
  const int64_t row_bytes = p.x.size(1) * item_bytes;
  const int64_t stride_bytes = p.out_stride ? p.out_stride * item_bytes : row_bytes;
  const int64_t num_rows = p.num_rows ? p.num_rows : p.out.size(0);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t from = p.index ? p.index[row] : row;
    if (from < 0) continue;
    const int64_t to = p.out_index ? p.out_index[row] : row;
    std::memcpy(p.out.as<char>() + to * stride_bytes, p.x.as<char>() + from * row_bytes, row_bytes);
  }
}

}  // namespace cpmcu::cpu
