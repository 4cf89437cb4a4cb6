// x[t, h, i] *= sigmoid(gate of head h, element i), in float32, rounded once.
//
// The gate of head h is at column first + h * stride of the row of `gates`. It has head_dim
// elements, or one for the whole head.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct SigmoidGateParams {
  Tensor x;          // [T, heads * head_dim], in place
  Tensor gates;      // [T, columns]
  int head_dim = 0;  // a multiple of 8
  int first = 0;     // column of the first head's gate, a multiple of 8
  int stride = 0;    // columns from one head's gate to the next: a multiple of 8, or 1 if of_heads
  bool of_heads = false;  // each head has one gate, not one for each element
};

inline void check_sigmoid_gate(const SigmoidGateParams& p) {
  const int64_t width = p.x.size(1), heads = width / p.head_dim;
  CHECK(
      p.x.dtype() == p.gates.dtype() && p.x.size(0) == p.gates.size(0) &&
          heads * p.head_dim == width &&
          p.first + (heads - 1) * p.stride + (p.of_heads ? 1 : p.head_dim) <= p.gates.size(1),
      "sigmoid_gate: x is {} {} with heads of {}, gates are {} {} at column {} and a stride of {}",
      name_of(p.x.dtype()), p.x.shape_text(), p.head_dim, name_of(p.gates.dtype()),
      p.gates.shape_text(), p.first, p.stride);
  CHECK(p.head_dim % 8 == 0 &&
            (p.of_heads || (p.first % 8 == 0 && p.stride % 8 == 0 && p.gates.size(1) % 8 == 0)),
        "sigmoid_gate: heads of {} at column {} and a stride of {} in rows of {}, expected "
        "multiples of 8",
        p.head_dim, p.first, p.stride, p.gates.size(1));
}

REGISTER_OP(sigmoid_gate, SigmoidGateParams)

}  // namespace cpmcu
