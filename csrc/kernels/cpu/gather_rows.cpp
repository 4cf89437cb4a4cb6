#include "kernels/gather_rows.h"

#include <cstring>

namespace cpmcu::cpu {

void gather_rows(const Context&, const GatherRowsParams& p) {
  CHECK(p.x.dtype() == p.out.dtype() && p.x.size(1) == p.out.size(1),
        "gather_rows: the input is {} {} but the output {} {}", name_of(p.x.dtype()),
        p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  const int64_t row_bytes = p.x.size(1) * size_of(p.x.dtype());
  for (int64_t row = 0; row < p.out.size(0); ++row) {
    std::memcpy(p.out.as<char>() + row * row_bytes, p.x.as<char>() + p.index[row] * row_bytes,
                row_bytes);
  }
}

}  // namespace cpmcu::cpu
