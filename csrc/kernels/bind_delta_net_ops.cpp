// C.ops of the layers with a state of their own: gated_delta_net, short_conv, mamba2.
#include "kernels/bind_ops.h"
#include "kernels/delta_net/gated_delta_net.h"
#include "kernels/mamba2/mamba2.h"
#include "kernels/short_conv/short_conv.h"

namespace cpmcu {

namespace py = pybind11;
using py::literals::operator""_a;

void bind_delta_net_ops(py::module_& m) {
  m.def(
      "gated_delta_net",
      [](const OpsContext& c, SharedArray out, SharedArray qkvz, SharedArray ba, int num_key_heads,
         int num_value_heads, int key_dim, int value_dim, bool fused, SharedArray conv_weight,
         SharedArray a_log, SharedArray dt_bias, SharedArray norm_weight, float norm_eps,
         SharedArray state, SharedArray window, SharedArray pending, SharedArray folded,
         const OpsAccepted& accepted, bool commits, const OpsTokens& tokens) {
        const DeltaShape shape{num_key_heads, num_value_heads, key_dim, value_dim};
        gated_delta_net(c.ctx, {.out = tensor_of(out),
                                .qkvz = tensor_of(qkvz),
                                .ba = tensor_of(ba),
                                .shape = shape,
                                .layout = delta_layout(shape, fused),
                                .conv_weight = tensor_of(conv_weight),
                                .a_log = tensor_of(a_log),
                                .dt_bias = tensor_of(dt_bias),
                                .norm_weight = tensor_of(norm_weight),
                                .norm_eps = norm_eps,
                                .state = tensor_of(state),
                                .window = tensor_of(window),
                                .pending = tensor_of(pending),
                                .folded = tensor_of(folded),
                                .accepted = accepted.params,
                                .commits = commits,
                                .tokens = tokens.tokens});
      },
      "ctx"_a, py::kw_only(), "out"_a, "qkvz"_a, "ba"_a, "num_key_heads"_a, "num_value_heads"_a,
      "key_dim"_a, "value_dim"_a, "fused"_a = false, "conv_weight"_a, "a_log"_a, "dt_bias"_a,
      "norm_weight"_a, "norm_eps"_a = 1e-6f, "state"_a, "window"_a, "pending"_a, "folded"_a,
      "accepted"_a = OpsAccepted(), "commits"_a, "tokens"_a,
      "csrc/kernels/delta_net/gated_delta_net.h");
  m.def(
      "short_conv",
      [](const OpsContext& c, SharedArray out, SharedArray x, bool silu, int first,
         SharedArray weight, SharedArray bias, SharedArray window, SharedArray pending,
         SharedArray folded, const OpsAccepted& accepted, bool commits, const OpsTokens& tokens) {
        short_conv(c.ctx, {.out = tensor_of(out),
                           .x = tensor_of(x),
                           .silu = silu,
                           .first = first,
                           .weight = tensor_of(weight),
                           .bias = tensor_of(bias),
                           .window = tensor_of(window),
                           .pending = tensor_of(pending),
                           .folded = tensor_of(folded),
                           .accepted = accepted.params,
                           .commits = commits,
                           .tokens = tokens.tokens});
      },
      "ctx"_a, py::kw_only(), "out"_a, "x"_a, "silu"_a = false, "first"_a = 0, "weight"_a,
      "bias"_a = SharedArray(), "window"_a, "pending"_a, "folded"_a, "accepted"_a = OpsAccepted(),
      "commits"_a, "tokens"_a, "csrc/kernels/short_conv/short_conv.h");
  m.def(
      "mamba2",
      [](const OpsContext& c, SharedArray y, SharedArray xbc, SharedArray dt, int first_dt,
         int num_heads, int head_dim, int num_groups, int state_size, SharedArray a_log,
         SharedArray dt_bias, SharedArray d, float min_step, float max_step, SharedArray state,
         SharedArray pending, SharedArray folded, const OpsAccepted& accepted, bool commits,
         const OpsTokens& tokens) {
        mamba2(c.ctx, {.y = tensor_of(y),
                       .xbc = tensor_of(xbc),
                       .dt = tensor_of(dt),
                       .first_dt = first_dt,
                       .shape = {num_heads, head_dim, num_groups, state_size},
                       .a_log = tensor_of(a_log),
                       .dt_bias = tensor_of(dt_bias),
                       .d = tensor_of(d),
                       .min_step = min_step,
                       .max_step = max_step,
                       .state = tensor_of(state),
                       .pending = tensor_of(pending),
                       .folded = tensor_of(folded),
                       .accepted = accepted.params,
                       .commits = commits,
                       .tokens = tokens.tokens});
      },
      "ctx"_a, py::kw_only(), "y"_a, "xbc"_a, "dt"_a, "first_dt"_a = 0, "num_heads"_a, "head_dim"_a,
      "num_groups"_a, "state_size"_a, "a_log"_a, "dt_bias"_a, "d"_a, "min_step"_a = 0.f,
      "max_step"_a = std::numeric_limits<float>::infinity(), "state"_a, "pending"_a, "folded"_a,
      "accepted"_a = OpsAccepted(), "commits"_a, "tokens"_a, "csrc/kernels/mamba2/mamba2.h");
}

}  // namespace cpmcu
