// out[r] = x[index[r]]
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct GatherRowsParams {
  Tensor out;                  // [R, H]
  Tensor x;                    // [T, H], same dtype
  const int* index = nullptr;  // [R] on the device
};

REGISTER_OP(gather_rows, GatherRowsParams)

}  // namespace cpmcu
