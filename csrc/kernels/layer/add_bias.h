// y[r] += bias[index[r]] in float32, rounded once: the bias of a projection, or of the expert of
// each row.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct AddBiasParams {
  Tensor y;     // [R, N], in place; dtype of bias, or float32
  Tensor bias;  // [E, N]
  // [R] on the device: the row of `bias`; null: row 0.
  const int* index = nullptr;
};

inline void check_add_bias(const AddBiasParams& p) {
  CHECK(p.y.num_dims() == 2 && p.bias.num_dims() == 2 && p.y.size(1) == p.bias.size(1) &&
            (p.index != nullptr || p.bias.size(0) == 1) &&
            (p.y.dtype() == p.bias.dtype() || p.y.dtype() == DType::kF32),
        "add_bias: y {} {} and bias {} {} do not fit, expected one width", name_of(p.y.dtype()),
        p.y.shape_text(), name_of(p.bias.dtype()), p.bias.shape_text());
}

REGISTER_OP(add_bias, AddBiasParams)

}  // namespace cpmcu
