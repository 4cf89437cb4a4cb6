// RMSNorm in place of groups of columns, such as the heads of q, k or v in a row of qkv:
//
//   x[t, g, i] *= (weight[i] + offset) / sqrt(mean_i x[t, g, i]^2 + eps), in float32, rounded once
//
// Group g begins at column first + g * width. One group of all heads norms them together. The norm
// of single heads of q and k with a weight is part of rotary_kv.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct NormHeadsParams {
  Tensor x;            // [T, columns]
  int first = 0;       // first column of the first group, a multiple of 8
  int num_groups = 1;  // number of groups in a row
  int width = 0;       // number of columns of a group, a multiple of 8
  Tensor weight{};     // [width], dtype of x; empty: every weight is 1, without weight_offset
  float eps = 1e-6f;
  float weight_offset = 0;  // 1: the weights are zero-centred
};

inline void check_norm_heads(const NormHeadsParams& p) {
  CHECK(p.x.num_dims() == 2 && p.first >= 0 && p.num_groups >= 1 && p.width >= 8 &&
            p.first + int64_t{p.num_groups} * p.width <= p.x.size(1) && p.first % 8 == 0 &&
            p.width % 8 == 0 && p.x.size(1) % 8 == 0,
        "norm_heads: {} groups of {} from column {} on do not fit x {}, expected multiples of 8",
        p.num_groups, p.width, p.first, p.x.shape_text());
  CHECK(p.weight.empty() || (p.weight.dtype() == p.x.dtype() && p.weight.num_elements() == p.width),
        "norm_heads: the weight is {} {}, expected {} [{}]", name_of(p.weight.dtype()),
        p.weight.shape_text(), name_of(p.x.dtype()), p.width);
}

REGISTER_OP(norm_heads, NormHeadsParams)

}  // namespace cpmcu
