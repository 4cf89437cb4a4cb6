// x = cap * tanh(x / cap), in place, float32: the final soft cap of logits. It keeps their order.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct SoftcapParams {
  Tensor x;  // float32, any shape
  float cap = 1;
};

inline void check_softcap(const SoftcapParams& p) {
  CHECK(p.x.dtype() == DType::kF32 && p.cap > 0,
        "softcap: x is {} and the cap {}, expected float32 and a cap above 0", name_of(p.x.dtype()),
        p.cap);
}

REGISTER_OP(softcap, SoftcapParams)

}  // namespace cpmcu
