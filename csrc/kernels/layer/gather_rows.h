// out[out_index[r]] = x[index[r]] for each r with index[r] >= 0.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct GatherRowsParams {
  Tensor out;                      // [R', H]; rows at a distance of out_stride
  Tensor x;                        // [T, H], same dtype
  const int* index = nullptr;      // [R] on the device; null: 0..R-1
  const int* out_index = nullptr;  // [R] on the device; null: 0..R-1
  int num_rows = 0;                // R; 0: out.size(0)
  int64_t out_stride = 0;          // elements from one row of out to the next; 0: H
};

REGISTER_OP(gather_rows, GatherRowsParams)

}  // namespace cpmcu
