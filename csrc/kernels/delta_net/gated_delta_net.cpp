// Checks of gated_delta_net that both back ends share.
#include "kernels/delta_net/gated_delta_net.h"

namespace cpmcu {
namespace {

void check_tensor(std::string_view name, const Tensor& tensor, DType dtype,
                  std::initializer_list<int64_t> shape) {
  const Tensor wanted(nullptr, dtype, shape);
  bool same = tensor.dtype() == dtype && tensor.num_dims() == wanted.num_dims();
  for (int i = 0; same && i < tensor.num_dims(); ++i) {
    same = wanted.size(i) < 0 || tensor.size(i) == wanted.size(i);
  }
  CHECK(same, "gated_delta_net: {} is {} {}, expected {} {} (-1: any)", name,
        name_of(tensor.dtype()), tensor.shape_text(), name_of(dtype), wanted.shape_text());
}

}  // namespace

void check_gated_delta_net(const GatedDeltaNetParams& p) {
  const DeltaShape& s = p.shape;
  CHECK(s.num_key_heads >= 1 && s.num_value_heads >= 1 &&
            s.num_value_heads % s.num_key_heads == 0 && s.key_dim >= 1 &&
            s.value_dim % kDeltaTileWidth == 0,
        "gated_delta_net: {} value heads of {} columns and {} key heads of {}, expected a multiple "
        "of the key heads and of {} columns",
        s.num_value_heads, s.value_dim, s.num_key_heads, s.key_dim, kDeltaTileWidth);
  const DType dtype = p.qkvz.dtype();
  const int64_t heads = s.num_value_heads;
  check_tensor("qkvz", p.qkvz, dtype, {-1, p.layout.qkvz_row});
  check_tensor("ba", p.ba, dtype, {-1, p.layout.ba_row});
  check_tensor("out", p.out, dtype, {-1, s.value_columns()});
  check_tensor("conv_weight", p.conv_weight, dtype, {s.conv_columns(), kConvTaps});
  check_tensor("a_log", p.a_log, DType::kF32, {heads});
  check_tensor("dt_bias", p.dt_bias, DType::kF32, {heads});
  check_tensor("norm_weight", p.norm_weight, dtype, {s.value_dim});
  check_tensor("state", p.state, DType::kF32,
               {-1, heads, s.value_dim / kDeltaTileWidth, int64_t{s.key_dim} * kDeltaTileWidth});
  check_tensor("window", p.window, dtype, {-1, heads, kConvTaps - 1, s.raw_width()});
  check_tensor("pending", p.pending, dtype, {-1, heads, -1, s.pending_width()});
  check_tensor("folded", p.folded, DType::kI32, {-1, heads});
  CHECK(p.commits || p.tokens.max_seq_tokens <= p.pending.size(2),
        "gated_delta_net: a decode step has up to {} tokens of a sequence, expected at most {}",
        p.tokens.max_seq_tokens, p.pending.size(2));
  CHECK(p.tokens.first_token == 0,
        "gated_delta_net: the launch begins at token {} of its sequences, expected 0",
        p.tokens.first_token);
}

}  // namespace cpmcu
