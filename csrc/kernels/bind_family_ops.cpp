// C.ops of the parts of a layer that only some model families have.
#include "kernels/bind_ops.h"
#include "kernels/layer/add_bias.h"
#include "kernels/layer/gated_activation.h"
#include "kernels/layer/gated_norm.h"
#include "kernels/layer/norm_add.h"
#include "kernels/layer/norm_heads.h"
#include "kernels/layer/softcap.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {

void bind_family_ops(py::module_& m) {
  m.def(
      "add_bias",
      [](const OpsContext& c, SharedArray y, SharedArray bias, SharedArray index) {
        add_bias(c.ctx, {tensor_of(y), tensor_of(bias), ints(index)});
      },
      "ctx"_a, py::kw_only(), "y"_a, "bias"_a, "index"_a = SharedArray(),
      "csrc/kernels/layer/add_bias.h");
  m.def(
      "gated_activation",
      [](const OpsContext& c, SharedArray out, SharedArray x, const std::string& kind, float alpha,
         float limit, bool alternates, SharedArray bias, SharedArray index, SharedArray order,
         SharedArray up, int first_up) {
        const Activation activation = kind == "silu"        ? Activation::kSilu
                                      : kind == "gelu_tanh" ? Activation::kGeluTanh
                                      : kind == "relu2"     ? Activation::kRelu2
                                                            : Activation::kClampedSwiglu;
        gated_activation(c.ctx,
                         {tensor_of(out), tensor_of(x), activation, alpha, limit, alternates,
                          tensor_of(bias), ints(index), ints(order), tensor_of(up), first_up});
      },
      "ctx"_a, py::kw_only(), "out"_a, "x"_a, "kind"_a, "alpha"_a = 1.f, "limit"_a = 0.f,
      "alternates"_a = false, "bias"_a = SharedArray(), "index"_a = SharedArray(),
      "order"_a = SharedArray(), "up"_a = SharedArray(), "first_up"_a = 0,
      "csrc/kernels/layer/gated_activation.h. kind: silu, gelu_tanh, relu2 or clamped_swiglu.");
  m.def(
      "gated_norm",
      [](const OpsContext& c, SharedArray out, SharedArray x, SharedArray gate, int first_gate,
         SharedArray weight, int num_groups, float eps) {
        gated_norm(c.ctx, {tensor_of(out), tensor_of(x), tensor_of(gate), first_gate,
                           tensor_of(weight), num_groups, eps});
      },
      "ctx"_a, py::kw_only(), "out"_a, "x"_a, "gate"_a, "first_gate"_a = 0, "weight"_a,
      "num_groups"_a = 1, "eps"_a = 1e-6f, "csrc/kernels/layer/gated_norm.h");
  m.def(
      "norm_add",
      [](const OpsContext& c, SharedArray hidden, SharedArray x, SharedArray weight, float eps,
         float weight_offset, SharedArray scale, float factor) {
        norm_add(c.ctx, {tensor_of(hidden), tensor_of(x), tensor_of(weight), eps, weight_offset,
                         tensor_of(scale), factor});
      },
      "ctx"_a, py::kw_only(), "hidden"_a, "x"_a, "weight"_a, "eps"_a = 1e-6f,
      "weight_offset"_a = 0.f, "scale"_a = SharedArray(), "factor"_a = 1.f,
      "csrc/kernels/layer/norm_add.h");
  m.def(
      "norm_heads",
      [](const OpsContext& c, SharedArray x, int first, int num_groups, int width,
         SharedArray weight, float eps, float weight_offset) {
        norm_heads(c.ctx,
                   {tensor_of(x), first, num_groups, width, tensor_of(weight), eps, weight_offset});
      },
      "ctx"_a, py::kw_only(), "x"_a, "first"_a = 0, "num_groups"_a = 1, "width"_a,
      "weight"_a = SharedArray(), "eps"_a = 1e-6f, "weight_offset"_a = 0.f,
      "csrc/kernels/layer/norm_heads.h");
  m.def(
      "softcap",
      [](const OpsContext& c, SharedArray x, float cap) { softcap(c.ctx, {tensor_of(x), cap}); },
      "ctx"_a, "x"_a, "cap"_a, "csrc/kernels/layer/softcap.h");
}

}  // namespace cpmcu
