// out[t, i] = silu(gate[t, i]) * up[t, i], silu(a) = a / (1 + exp(-a)), in float32.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct SiluMulParams {
  Tensor out;                // [T, I]
  Tensor x;                  // [T, 2 I]: gate, then up
  bool interleaved = false;  // gate and up are interleaved in groups of eight columns
};

REGISTER_OP(silu_mul, SiluMulParams)

}  // namespace cpmcu
