// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * (weight + offset), in float32. With an index,
// x[index[t]] replaces x[t].
//
// Residual additions are not part of this op: the beta of the preceding linear layer does them
// (linear/linear.h).
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct RmsNormParams {
  Tensor out;     // [T, H]
  Tensor x;       // [T, H]; with an index [T', H]
  Tensor weight;  // [H]
  float eps = 1e-6f;
  int64_t out_stride = 0;      // elements from one row of out to the next; 0: H
  const int* index = nullptr;  // [T] row numbers of x, in device memory; null: 0..T-1
  float weight_offset = 0;     // 1: the weights are zero-centred
};

REGISTER_OP(rms_norm, RmsNormParams)

}  // namespace cpmcu
