// Mamba-2 (Dao and Gu, arXiv:2405.21060) of a step's tokens: the recurrence of one layer. The
// convolution of x, B and C comes before it (kernels/short_conv), the norm after it
// (kernels/layer/gated_norm.h).
//
// Head h uses B and C of group h / (heads / groups). For each token, in float32:
//
//   d = clamp(softplus(dt + dt_bias), min_step, max_step)
//   S <- exp(-exp(A_log) d) S + (d x) B^T          S is [P, N]
//   y = S C + D x, rounded to the model's dtype
//
// A token follows its parent (kernels/step/step_tokens.h). A token has the same operations in
// the same order in a prefill, in plain decoding and in a tree. So chunks and trees change no bit.
//
// Deferred commit, as in kernels/delta_net/gated_delta_net.h: a decode step stores x, B and dt of
// its tokens (`pending`) and leaves S alone. The next step of the slot first adds the accepted
// ones to S. `folded` counts the tokens that S contains.
#pragma once

#include <limits>

#include "kernels/op.h"
#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct MambaShape {
  int num_heads = 0;
  int head_dim = 0;    // P, a multiple of 8
  int num_groups = 0;  // a divisor of num_heads
  int state_size = 0;  // N, a multiple of 8

  constexpr int64_t inner() const { return int64_t{num_heads} * head_dim; }  // columns of y
  constexpr int64_t conv_columns() const { return inner() + int64_t{2} * num_groups * state_size; }
  // A row of `pending`: x, B, dt, and padding to 16 bytes.
  constexpr int64_t pending_width() const { return int64_t{head_dim} + state_size + 8; }
};

struct Mamba2Params {
  Tensor y;    // [T, heads * P]
  Tensor xbc;  // [T, heads * P + 2 groups * N]: x of the heads, then B and C of the groups
  Tensor dt;   // [T, columns]; heads of them, from first_dt on, are dt
  int64_t first_dt = 0;  // the column that holds dt of head 0
  MambaShape shape;
  Tensor a_log;    // [heads] float32
  Tensor dt_bias;  // [heads] float32
  Tensor d;        // [heads] float32, D
  float min_step = 0;
  float max_step = std::numeric_limits<float>::infinity();
  // The state of the slots.
  Tensor state;  // [slots, heads, P, N] float32: S
  // [slots, heads, most tokens of a decode step, pending_width]: the tokens of the last decode
  // step.
  Tensor pending;
  Tensor folded;  // [slots, heads] int32: number of tokens that S contains
  // The accepted tokens of each slot's last step; empty: `pending` is not read.
  Accepted accepted{};
  bool commits = false;  // a prefill: S takes up all tokens at once, and there are no parents
  StepTokens tokens;
};

inline void check_mamba2(const Mamba2Params& p) {
  const DType dtype = p.xbc.dtype();
  const MambaShape& s = p.shape;
  CHECK(
      s.num_heads >= 1 && s.head_dim >= 8 && s.head_dim % 8 == 0 && s.num_groups >= 1 &&
          s.num_heads % s.num_groups == 0 && s.state_size >= 8 && s.state_size % 8 == 0,
      "mamba2: {} heads of {} columns, {} groups and a state_size of {}; expected multiples of 8, "
      "and a divisor of the heads",
      s.num_heads, s.head_dim, s.num_groups, s.state_size);
  CHECK(p.y.num_dims() == 2 && p.y.dtype() == dtype && p.y.size(1) == s.inner() &&
            p.xbc.num_dims() == 2 && p.xbc.size(1) == s.conv_columns() &&
            p.xbc.size(0) == p.y.size(0) && p.dt.num_dims() == 2 && p.dt.dtype() == dtype &&
            p.dt.size(0) == p.y.size(0) && p.first_dt >= 0 &&
            p.first_dt + s.num_heads <= p.dt.size(1),
        "mamba2: y is {}, xbc {} {} and dt {} from column {} on; expected [T, {}], [T, {}] and "
        "[T, {} columns or more] of one dtype",
        p.y.shape_text(), name_of(dtype), p.xbc.shape_text(), p.dt.shape_text(), p.first_dt,
        s.inner(), s.conv_columns(), s.num_heads);
  for (const Tensor* each : {&p.a_log, &p.dt_bias, &p.d}) {
    CHECK(each->dtype() == DType::kF32 && each->num_elements() == s.num_heads,
          "mamba2: A_log, dt_bias or D is {} {}, expected float32 [{}]", name_of(each->dtype()),
          each->shape_text(), s.num_heads);
  }
  CHECK(p.state.num_dims() == 4 && p.state.dtype() == DType::kF32 &&
            p.state.size(1) == s.num_heads && p.state.size(2) == s.head_dim &&
            p.state.size(3) == s.state_size && p.pending.num_dims() == 4 &&
            p.pending.dtype() == dtype && p.pending.size(1) == s.num_heads &&
            p.pending.size(3) == s.pending_width() && p.folded.num_dims() == 2 &&
            p.folded.dtype() == DType::kI32 && p.folded.size(1) == s.num_heads,
        "mamba2: state is {}, pending {} and folded {}; expected float32 [slots, {}, {}, {}], "
        "[slots, {}, nodes, {}] and int32 [slots, {}]",
        p.state.shape_text(), p.pending.shape_text(), p.folded.shape_text(), s.num_heads,
        s.head_dim, s.state_size, s.num_heads, s.pending_width(), s.num_heads);
  CHECK((p.commits || p.tokens.max_seq_tokens <= p.pending.size(2)) && p.tokens.first_token == 0,
        "mamba2: a decode step has {} tokens of a sequence from token {} on, expected at most {} "
        "from 0 on",
        p.tokens.max_seq_tokens, p.tokens.first_token, p.pending.size(2));
}

REGISTER_OP(mamba2, Mamba2Params)

}  // namespace cpmcu
