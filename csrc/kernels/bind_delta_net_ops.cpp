// C.ops of the layers with a state of their own: gated_delta_net, short_conv, mamba2.
#include "kernels/bind_fields.h"
#include "kernels/delta_net/gated_delta_net.h"
#include "kernels/mamba2/mamba2.h"
#include "kernels/short_conv/short_conv.h"

namespace cpmcu {

namespace py = pybind11;

void bind_delta_net_ops(py::module_& m) {
  using Delta = GatedDeltaNetParams;
  const auto fused =
      optional(field_of<Delta, bool>(
                   "fused", [](Delta& p, bool fused) { p.layout = delta_layout(p.shape, fused); }),
               py::bool_(false));
  bind_op(
      m, "gated_delta_net", gated_delta_net, "csrc/kernels/delta_net/gated_delta_net.h",
      py::kw_only(), field("out", &Delta::out), field("qkvz", &Delta::qkvz),
      field("ba", &Delta::ba),
      within(&Delta::shape, field("num_key_heads", &DeltaShape::num_key_heads),
             field("num_value_heads", &DeltaShape::num_value_heads),
             field("key_dim", &DeltaShape::key_dim), field("value_dim", &DeltaShape::value_dim)),
      fused, field("conv_weight", &Delta::conv_weight), field("a_log", &Delta::a_log),
      field("dt_bias", &Delta::dt_bias), field("norm_weight", &Delta::norm_weight),
      option("norm_eps", &Delta::norm_eps), field("state", &Delta::state),
      field("window", &Delta::window), field("pending", &Delta::pending),
      field("folded", &Delta::folded), option("accepted", &Delta::accepted),
      option("accepts_all", &Delta::accepts_all), field("commits", &Delta::commits),
      field("tokens", &Delta::tokens));
  using Conv = ShortConvParams;
  bind_op(m, "short_conv", short_conv, "csrc/kernels/short_conv/short_conv.h", py::kw_only(),
          field("out", &Conv::out), field("x", &Conv::x), option("silu", &Conv::silu),
          option("first", &Conv::first), field("weight", &Conv::weight),
          option("bias", &Conv::bias), field("window", &Conv::window),
          field("pending", &Conv::pending), field("folded", &Conv::folded),
          option("accepted", &Conv::accepted), field("commits", &Conv::commits),
          field("tokens", &Conv::tokens));
  using Mamba = Mamba2Params;
  bind_op(
      m, "mamba2", mamba2, "csrc/kernels/mamba2/mamba2.h", py::kw_only(), field("y", &Mamba::y),
      field("xbc", &Mamba::xbc), field("dt", &Mamba::dt), option("first_dt", &Mamba::first_dt),
      within(&Mamba::shape, field("num_heads", &MambaShape::num_heads),
             field("head_dim", &MambaShape::head_dim), field("num_groups", &MambaShape::num_groups),
             field("state_size", &MambaShape::state_size)),
      field("a_log", &Mamba::a_log), field("dt_bias", &Mamba::dt_bias), field("d", &Mamba::d),
      option("min_step", &Mamba::min_step), option("max_step", &Mamba::max_step),
      field("state", &Mamba::state), field("pending", &Mamba::pending),
      field("folded", &Mamba::folded), option("accepted", &Mamba::accepted),
      field("commits", &Mamba::commits), field("tokens", &Mamba::tokens));
}

}  // namespace cpmcu
