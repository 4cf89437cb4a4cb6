// hidden[t] = (hidden[t] + x[t] / sqrt(mean(x[t]^2) + eps) * (weight + offset)) * scale * factor,
// in float32, rounded once: the norm of a block's output, and the residual addition.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct NormAddParams {
  Tensor hidden;  // [T, H]
  Tensor x;       // [T, H]
  Tensor weight;  // [H]
  float eps = 1e-6f;
  float weight_offset = 0;  // 1: the weights are zero-centred
  Tensor scale{};           // [1] of the same dtype; empty: 1
  float factor = 1;
};

inline void check_norm_add(const NormAddParams& p) {
  const DType dtype = p.x.dtype();
  CHECK(p.x.num_dims() == 2 && p.hidden.num_dims() == 2 && p.hidden.size(0) == p.x.size(0) &&
            p.hidden.size(1) == p.x.size(1) && p.weight.num_elements() == p.x.size(1) &&
            p.hidden.dtype() == dtype && p.weight.dtype() == dtype,
        "norm_add: hidden is {} {}, x {} {}, weight {} {}; expected one dtype and width",
        name_of(p.hidden.dtype()), p.hidden.shape_text(), name_of(dtype), p.x.shape_text(),
        name_of(p.weight.dtype()), p.weight.shape_text());
  CHECK(p.scale.empty() || (p.scale.dtype() == dtype && p.scale.num_elements() == 1),
        "norm_add: the scale is {} {}, expected {} [1]", name_of(p.scale.dtype()),
        p.scale.shape_text(), name_of(dtype));
}

REGISTER_OP(norm_add, NormAddParams)

}  // namespace cpmcu
