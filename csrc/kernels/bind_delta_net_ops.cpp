// C.ops of the layers with a state of their own: gated_delta_net, short_conv.
#include "kernels/bind_ops.h"
#include "kernels/delta_net/gated_delta_net.h"
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
      [](const OpsContext& c, SharedArray out, SharedArray bcx, SharedArray weight,
         SharedArray bias, SharedArray window, SharedArray pending, SharedArray folded,
         const OpsAccepted& accepted, bool commits, const OpsTokens& tokens) {
        short_conv(c.ctx, {.out = tensor_of(out),
                           .bcx = tensor_of(bcx),
                           .weight = tensor_of(weight),
                           .bias = tensor_of(bias),
                           .window = tensor_of(window),
                           .pending = tensor_of(pending),
                           .folded = tensor_of(folded),
                           .accepted = accepted.params,
                           .commits = commits,
                           .tokens = tokens.tokens});
      },
      "ctx"_a, py::kw_only(), "out"_a, "bcx"_a, "weight"_a, "bias"_a = SharedArray(), "window"_a,
      "pending"_a, "folded"_a, "accepted"_a = OpsAccepted(), "commits"_a, "tokens"_a,
      "csrc/kernels/short_conv/short_conv.h");
}

}  // namespace cpmcu
