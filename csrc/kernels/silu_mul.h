// out[t, i] = silu(x[t, i]) * x[t, I + i], silu(a) = a / (1 + exp(-a)), in float32.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct SiluMulParams {
  Tensor out;  // [T, I]
  Tensor x;    // [T, 2 I]: gate, then up
};

REGISTER_OP(silu_mul, SiluMulParams)

}  // namespace cpmcu
