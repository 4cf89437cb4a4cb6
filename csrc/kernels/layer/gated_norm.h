// RMSNorm of gated groups of columns, the norm of a Mamba-2 layer. For each row and group:
//
//   v = x * silu(gate)        out = weight * v / sqrt(mean v^2 + eps), in float32, rounded once
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct GatedNormParams {
  Tensor out;              // [T, W]; may be x
  Tensor x;                // [T, W]
  Tensor gate;             // [T, columns], of which W columns from first_gate on are the gate
  int64_t first_gate = 0;  // a multiple of 8
  Tensor weight;           // [W]
  int num_groups = 1;      // W / num_groups is a multiple of 8
  float eps = 1e-6f;
};

inline void check_gated_norm(const GatedNormParams& p) {
  const int64_t width = p.x.num_dims() == 2 ? p.x.size(1) : 0;
  CHECK(p.out.num_dims() == 2 && p.out.size(1) == width && p.num_groups >= 1 && width > 0 &&
            width % (8 * p.num_groups) == 0 && p.gate.num_dims() == 2 && p.first_gate >= 0 &&
            p.first_gate % 8 == 0 && p.gate.size(1) % 8 == 0 &&
            p.first_gate + width <= p.gate.size(1) && p.out.size(0) == p.x.size(0) &&
            p.gate.size(0) == p.x.size(0),
        "gated_norm: out is {}, x {} in {} groups, gate {} from column {} on; expected [T, W], "
        "[T, W] and [T, W columns or more], multiples of 8",
        p.out.shape_text(), p.x.shape_text(), p.num_groups, p.gate.shape_text(), p.first_gate);
  CHECK(p.out.dtype() == p.x.dtype() && p.gate.dtype() == p.x.dtype() &&
            p.weight.dtype() == p.x.dtype() && p.weight.num_elements() == width,
        "gated_norm: out is {}, x {}, gate {} and the weight {} {}; expected one dtype and [{}]",
        name_of(p.out.dtype()), name_of(p.x.dtype()), name_of(p.gate.dtype()),
        name_of(p.weight.dtype()), p.weight.shape_text(), width);
}

REGISTER_OP(gated_norm, GatedNormParams)

}  // namespace cpmcu
