// C.ops of the parts of a layer that only some model families have.
#include "kernels/bind_fields.h"
#include "kernels/layer/add_bias.h"
#include "kernels/layer/gated_activation.h"
#include "kernels/layer/gated_norm.h"
#include "kernels/layer/norm_add.h"
#include "kernels/layer/norm_heads.h"
#include "kernels/layer/softcap.h"

namespace py = pybind11;

namespace cpmcu {

void bind_family_ops(py::module_& m) {
  bind_op(m, "add_bias", add_bias, "csrc/kernels/layer/add_bias.h", py::kw_only(),
          field("y", &AddBiasParams::y), field("bias", &AddBiasParams::bias),
          option("index", &AddBiasParams::index));
  using Gated = GatedActivationParams;
  const auto kind = field_of<Gated, std::string>("kind", [](Gated& p, const std::string& name) {
    p.kind = name == "silu"        ? Activation::kSilu
             : name == "gelu_tanh" ? Activation::kGeluTanh
             : name == "relu2"     ? Activation::kRelu2
                                   : Activation::kClampedSwiglu;
  });
  bind_op(m, "gated_activation", gated_activation,
          "csrc/kernels/layer/gated_activation.h. kind: silu, gelu_tanh, relu2 or clamped_swiglu.",
          py::kw_only(), field("out", &Gated::out), field("x", &Gated::x), kind,
          option("alpha", &Gated::alpha), option("limit", &Gated::limit),
          option("alternates", &Gated::alternates), option("bias", &Gated::bias),
          option("index", &Gated::index), option("order", &Gated::order), option("up", &Gated::up),
          option("first_up", &Gated::first_up));
  using Norm = GatedNormParams;
  bind_op(m, "gated_norm", gated_norm, "csrc/kernels/layer/gated_norm.h", py::kw_only(),
          field("out", &Norm::out), field("x", &Norm::x), field("gate", &Norm::gate),
          option("first_gate", &Norm::first_gate), field("weight", &Norm::weight),
          option("num_groups", &Norm::num_groups), option("eps", &Norm::eps));
  using Add = NormAddParams;
  bind_op(m, "norm_add", norm_add, "csrc/kernels/layer/norm_add.h", py::kw_only(),
          field("hidden", &Add::hidden), field("x", &Add::x), field("weight", &Add::weight),
          option("eps", &Add::eps), option("weight_offset", &Add::weight_offset),
          option("scale", &Add::scale), option("factor", &Add::factor));
  using Heads = NormHeadsParams;
  bind_op(m, "norm_heads", norm_heads, "csrc/kernels/layer/norm_heads.h", py::kw_only(),
          field("x", &Heads::x), option("first", &Heads::first),
          option("num_groups", &Heads::num_groups), field("width", &Heads::width),
          option("weight", &Heads::weight), option("eps", &Heads::eps),
          option("weight_offset", &Heads::weight_offset));
  bind_op(m, "softcap", softcap, "csrc/kernels/layer/softcap.h", field("x", &SoftcapParams::x),
          field("cap", &SoftcapParams::cap));
}

}  // namespace cpmcu
