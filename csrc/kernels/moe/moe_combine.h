// hidden[t] += scale * (sum over ranks j of weight[t, j] * (y[t * k + j] + bias[expert[t, j]]) +
// sigmoid(g[t]) * shared[t])
//
// The sum is in float32, in the order of rank, the shared expert last, and is rounded once. So a
// token's bits do not depend on the other tokens. The next norm may be part of the launch; it has
// the bits of rms_norm.
#pragma once

#include "kernels/layer/rms_norm.h"
#include "kernels/moe/moe_route.h"

namespace cpmcu {

struct MoeCombineParams {
  Tensor hidden;         // [T, D]
  Tensor y;              // [T * k, D] float32
  Routing routing;       // only its weights are read, with a bias also its experts
  Tensor bias{};         // [E, D], the dtype of hidden; empty: none
  Tensor shared{};       // [T, D] float32; empty: no shared expert
  Tensor shared_gate{};  // [T, columns] float32: g is column `gate_column`
  int64_t gate_column = 0;
  float scale = 1;
  // Norms `hidden` after the sum. It has no index. Empty: no norm.
  RmsNormParams norm{};
};

inline void check_moe_combine(const MoeCombineParams& p) {
  check_routing(p.routing);
  CHECK(p.hidden.num_dims() == 2 && is_floating(p.hidden.dtype()) && p.y.num_dims() == 2 &&
            p.y.dtype() == DType::kF32 && p.y.size(0) == p.hidden.size(0) * p.routing.top_k &&
            p.y.size(1) == p.hidden.size(1) && p.hidden.size(1) % 8 == 0,
        "moe_combine: hidden {} and y {} of {} experts a token do not fit", p.hidden.shape_text(),
        p.y.shape_text(), p.routing.top_k);
  CHECK(p.bias.empty() ||
            (p.bias.num_dims() == 2 && p.bias.dtype() == p.hidden.dtype() &&
             p.bias.size(0) == p.routing.num_experts && p.bias.size(1) == p.hidden.size(1)),
        "moe_combine: hidden {} of {} and a bias {} of {} for {} experts do not fit",
        p.hidden.shape_text(), name_of(p.hidden.dtype()), p.bias.shape_text(),
        name_of(p.bias.dtype()), p.routing.num_experts);
  CHECK(p.norm.out.empty() || (p.norm.x.data() == p.hidden.data() &&
                               p.norm.out.num_elements() == p.hidden.num_elements() &&
                               p.norm.index == nullptr && p.norm.out_stride == 0),
        "moe_combine: the norm of x {} to {} is not one of all of hidden {}", p.norm.x.shape_text(),
        p.norm.out.shape_text(), p.hidden.shape_text());
  if (p.shared.empty()) return;
  CHECK(p.shared.num_dims() == 2 && p.shared.dtype() == DType::kF32 &&
            p.shared.size(0) == p.hidden.size(0) && p.shared.size(1) == p.hidden.size(1) &&
            p.shared_gate.num_dims() == 2 && p.shared_gate.dtype() == DType::kF32 &&
            p.shared_gate.size(0) == p.hidden.size(0) && p.gate_column >= 0 &&
            p.gate_column < p.shared_gate.size(1),
        "moe_combine: hidden {}, shared {} and its gate {} (column {}) do not fit",
        p.hidden.shape_text(), p.shared.shape_text(), p.shared_gate.shape_text(), p.gate_column);
}

REGISTER_OP(moe_combine, MoeCombineParams)

}  // namespace cpmcu
