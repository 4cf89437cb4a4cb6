// out[r, i] = activation(gate[r, i] + its bias, up[r, i] + its bias), in float32, rounded once.
//
//   kGeluTanh       gelu(gate) * up, gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) (a + 0.044715 a^3)))
//   kClampedSwiglu  g / (1 + exp(-alpha g)) * (u + 1), g = min(gate, limit),
//                   u = clamp(up, -limit, limit)
//   kSilu           silu(gate) * up, for a projection with a bias; else silu_mul
//   kRelu2          max(up, 0)^2, without a gate
#pragma once

#include "kernels/op.h"

namespace cpmcu {

enum class Activation { kSilu, kGeluTanh, kClampedSwiglu, kRelu2 };

struct GatedActivationParams {
  Tensor out;  // [R, I]
  // [R, 2 I], same dtype: gate, then up. With `up`, or for kRelu2, [R, I]: gate only.
  Tensor x;
  Activation kind = Activation::kSilu;
  float alpha = 1;
  float limit = 0;
  bool alternates = false;  // column 2 i of x and of the bias is gate i, column 2 i + 1 is up i
  Tensor bias{};            // [E, 2 I], dtype of x; empty: none
  // Row r has row index[order[r]] of `bias`; both on the device. order null: index[r].
  const int* index = nullptr;
  const int* order = nullptr;
  // [R, columns], dtype of x: up is columns [first_up, first_up + I). It excludes a bias. Empty: up
  // is in x.
  Tensor up{};
  int64_t first_up = 0;
};

inline void check_gated_activation(const GatedActivationParams& p) {
  const bool gated = p.kind != Activation::kRelu2;
  CHECK(p.out.num_dims() == 2 && p.x.num_dims() == 2 && p.out.dtype() == p.x.dtype() &&
            p.x.size(0) == p.out.size(0) &&
            p.x.size(1) == (gated && p.up.empty() ? 2 : 1) * p.out.size(1) &&
            p.out.size(1) % 8 == 0,
        "gated_activation: x is {} {}, out {} {}; expected {} in x, multiples of 8",
        name_of(p.x.dtype()), p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text(),
        gated ? "twice as many columns" : "the same columns");
  CHECK(gated || (p.up.empty() && p.bias.empty() && !p.alternates),
        "gated_activation: the squared ReLU has a bias or a gate, expected neither");
  CHECK(p.up.empty() || (p.up.num_dims() == 2 && p.up.dtype() == p.x.dtype() && p.bias.empty() &&
                         !p.alternates && p.up.size(0) == p.x.size(0) && p.first_up >= 0 &&
                         p.first_up % 8 == 0 && p.up.size(1) % 8 == 0 &&
                         p.first_up + p.x.size(1) <= p.up.size(1)),
        "gated_activation: up is {} {} from column {} on, expected rows of x {}, multiples of 8, "
        "and no bias",
        name_of(p.up.dtype()), p.up.shape_text(), p.first_up, p.x.shape_text());
  CHECK(p.bias.empty() ||
            (p.bias.dtype() == p.x.dtype() && p.bias.num_dims() == 2 &&
             p.bias.size(1) == p.x.size(1) && (p.index != nullptr || p.bias.size(0) == 1)),
        "gated_activation: the bias is {} {}, expected {} rows of {}", name_of(p.bias.dtype()),
        p.bias.shape_text(), name_of(p.x.dtype()), p.x.size(1));
}

REGISTER_OP(gated_activation, GatedActivationParams)

}  // namespace cpmcu
