// Gated delta net (Yang et al., arXiv:2412.06464) of a step's tokens: everything between the input
// projections and the output projection of one layer.
//
// Value head j uses key head j / (Hv / Hk). For each token, with its raw projections q, k, v, z of
// the head and a, b, in float32:
//
//   q, k, v  <- silu(sum over t = 0..3 of conv[c, t] * raw[c] of the token 3 - t places before)
//   q, k, v are rounded to the model's dtype
//   q  <- q / sqrt(sum q^2 + 1e-6) / sqrt(Dk)      k <- k / sqrt(sum k^2 + 1e-6)
//   S  <- exp(-exp(A_log) * softplus(a + dt_bias)) * S          S is [Dk, Dv]
//   S  <- S + k (sigmoid(b) * (v - S^T k))^T                    o = S^T q
//   out = norm_weight * o / sqrt(mean(o^2) + eps) * silu(z)
//
// A token follows its parent (kernels/step/step_tokens.h). The operations of a token and their
// order are the same in a prefill, in plain decoding and in a tree. So an accepted token has the
// bits of plain decoding, and chunks of a prompt change no bit.
//
// Deferred commit. A decode step does not know which of its tokens will be accepted, so it stores
// their raw projections (`pending`) and leaves S alone. The next step of the slot first adds the
// accepted ones to S. `folded` counts the tokens that S contains:
//
//   folded == L                     S is up to date, or the last step was abandoned
//   folded + accepted.counts == L   the pending tokens of accepted.paths are added first
//
// L is the length of the slot. Thus each step reads and writes S once, as plain decoding does.
//
// A step may add its token to S at once if it has no draft and will not be abandoned
// (`accepts_all`). Then `folded` is L + 1. If the sequence has ended, no token is accepted, and S
// has one too many. Nothing reads this S: the slot's next sequence begins with another. Further
// steps of the ended sequence find accepted.counts 0 and add nothing.
#pragma once

#include "kernels/op.h"
#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

constexpr int kConvTaps = 4;        // tokens that the convolution reads, the token itself included
constexpr int kDeltaTileWidth = 8;  // columns of S in one tile

// First column of head 0, and columns from one key head to the next. Value heads of one key head
// are adjacent.
struct HeadColumns {
  int first = 0;
  int stride = 0;
};

// The places of a token's projections.
//
//   separate   qkvz [q heads | k heads | v heads | z heads], ba [b heads | a heads]
//   fused      a group for each key head: qkvz [q, k, v…, z…], ba [b…, a…] (Qwen3-Next)
struct DeltaLayout {
  int qkvz_row = 0;  // number of columns of a row of qkvz
  int ba_row = 0;
  HeadColumns q{}, k{}, v{}, z{}, b{}, a{};
};

struct DeltaShape {
  int num_key_heads = 0;    // Hk
  int num_value_heads = 0;  // Hv, a multiple of Hk
  int key_dim = 0;          // Dk
  int value_dim = 0;        // Dv, a multiple of 8

  int group() const { return num_value_heads / num_key_heads; }
  int conv_columns() const { return 2 * num_key_heads * key_dim + num_value_heads * value_dim; }
  int value_columns() const { return num_value_heads * value_dim; }
  int raw_width() const { return 2 * key_dim + value_dim; }  // q, k, v of one value head
  // A pending token of one value head: q, k, v, b, a, and padding to 16 bytes.
  int pending_width() const { return raw_width() + 8; }
};

inline DeltaLayout delta_layout(const DeltaShape& s, bool fused) {
  const int keys = s.num_key_heads * s.key_dim, group = s.group(), values = group * s.value_dim;
  DeltaLayout layout{.qkvz_row = s.conv_columns() + s.value_columns(),
                     .ba_row = 2 * s.num_value_heads};
  if (fused) {
    const int stride = 2 * (s.key_dim + values);
    layout.q = {0, stride};
    layout.k = {s.key_dim, stride};
    layout.v = {2 * s.key_dim, stride};
    layout.z = {2 * s.key_dim + values, stride};
    layout.b = {0, 2 * group};
    layout.a = {group, 2 * group};
  } else {
    layout.q = {0, s.key_dim};
    layout.k = {keys, s.key_dim};
    layout.v = {2 * keys, values};
    layout.z = {s.conv_columns(), values};
    layout.b = {0, group};
    layout.a = {s.num_value_heads, group};
  }
  return layout;
}

struct GatedDeltaNetParams {
  Tensor out;   // [T, Hv * Dv]
  Tensor qkvz;  // [T, columns of the layout]
  Tensor ba;    // [T, 2 Hv]
  DeltaShape shape;
  DeltaLayout layout;
  // [2 Hk Dk + Hv Dv, 4]: the channels of q, k and v, each in the order of heads.
  Tensor conv_weight;
  Tensor a_log;        // [Hv] float32
  Tensor dt_bias;      // [Hv] float32
  Tensor norm_weight;  // [Dv]
  float norm_eps = 1e-6f;
  // The state of the slots. S is stored in tiles of 8 columns.
  Tensor state;   // [slots, Hv, Dv / 8, Dk * 8] float32
  Tensor window;  // [slots, Hv, 3, 2 Dk + Dv]: raw q, k, v of the last 3 tokens in S
  // [slots, Hv, most tokens of a decode step, pending_width]: the last decode step's projections.
  Tensor pending;
  Tensor folded;  // [slots, Hv] int32: number of tokens that S contains
  // The accepted tokens of each slot's last step; empty: no slot has pending tokens.
  Accepted accepted;
  bool accepts_all = false;  // as Step::accepts_all
  bool commits = false;      // a prefill: S takes up all tokens at once, and there are no parents
  StepTokens tokens;
};

REGISTER_OP(gated_delta_net, GatedDeltaNetParams)

// Throws if shapes or dtypes do not fit together.
void check_gated_delta_net(const GatedDeltaNetParams& p);

}  // namespace cpmcu
