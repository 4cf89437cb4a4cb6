// The activation of an MLP or of experts, read from the parameters of the block.
#pragma once

#include <string>

#include "core/params.h"
#include "kernels/layer/gated_activation.h"

namespace cpmcu {

struct Gating {
  Activation kind = Activation::kSilu;
  float alpha = 1, limit = 0;  // parameters of clamped_swiglu

  bool is_silu() const { return kind == Activation::kSilu; }
  // Whether the MLP has a gate.
  bool is_gated() const { return kind != Activation::kRelu2; }
  // Number of columns of gate and up together.
  int64_t columns(int64_t width) const { return (is_gated() ? 2 : 1) * width; }
};

// Reads `activation`, and for clamped_swiglu `swiglu_alpha` and `swiglu_limit`.
inline Gating gating_of(const Params& params) {
  const std::string name = params.text("activation", "silu");
  if (name == "silu") return {};
  if (name == "gelu_tanh") return {.kind = Activation::kGeluTanh};
  if (name == "relu2") return {.kind = Activation::kRelu2};
  CHECK(name == "clamped_swiglu",
        "activation is \"{}\", expected silu, gelu_tanh, clamped_swiglu or relu2", name);
  const Gating gating{.kind = Activation::kClampedSwiglu,
                      .alpha = params.number("swiglu_alpha", 1.702f),
                      .limit = params.number("swiglu_limit", 7)};
  CHECK(gating.limit > 0, "swiglu_limit is {}, expected a number above 0", gating.limit);
  return gating;
}

}  // namespace cpmcu
