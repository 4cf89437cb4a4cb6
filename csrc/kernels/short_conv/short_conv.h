// Short causal convolution of a step's tokens, for each channel by itself:
//
//   sum = bias + sum over t = 0..K - 1 of weight[t] * u of the token K - 1 - t places before
//
//   gated (LFM2)    x is b, c, x for each channel. u = b * x, rounded to the model's dtype;
//                   out = c * sum
//   SiLU (Mamba-2)  u = columns first, first + 1, ... of x; out = silu(sum)
//
// A token follows its parent (kernels/step/step_tokens.h). The operations of a token are the same
// in a prefill, in plain decoding and in a tree. So chunks and trees change no bit.
//
// Deferred commit, as in kernels/delta_net/gated_delta_net.h: a decode step stores u of its tokens
// (`pending`). The next step of the slot moves the accepted ones to `window`, which holds u of the
// last K - 1 tokens. `folded` is the number of tokens that `window` has taken in so far.
#pragma once

#include "kernels/op.h"
#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

// Maximum K: tokens that the convolution reads, the token itself included.
constexpr int kMaxConvTaps = 8;

struct ShortConvParams {
  Tensor out;         // [T, H]
  Tensor x;           // gated: [T, 3 H], of which H are b, H are c, H are x; SiLU: [T, columns]
  bool silu = false;  // true: the SiLU form; false: the gated form
  int64_t first = 0;  // only for SiLU: first column of u
  Tensor weight;      // [H, K]
  Tensor bias{};      // [H]; empty: no bias
  // The state of the slots.
  Tensor window;   // [slots, K - 1, H]: u of the last K - 1 accepted tokens
  Tensor pending;  // [slots, most tokens of a decode step, H]: u of the last decode step's tokens
  Tensor folded;   // [slots, H] int32: tokens that `window` has taken in, the same for all channels
  // The accepted tokens of each slot's last step; empty: `pending` is not read.
  Accepted accepted{};
  bool commits = false;  // a prefill: all tokens are accepted, and there are no parents
  StepTokens tokens;
};

inline void check_short_conv(const ShortConvParams& p) {
  const DType dtype = p.x.dtype();
  const int64_t width = p.out.size(1);
  const int64_t kernel_size = p.weight.num_dims() == 2 ? p.weight.size(1) : 0;
  CHECK(p.out.num_dims() == 2 && p.x.num_dims() == 2 && p.x.size(0) == p.out.size(0) &&
            (p.silu ? p.first >= 0 && p.first + width <= p.x.size(1) : p.x.size(1) == 3 * width) &&
            p.out.dtype() == dtype && p.weight.dtype() == dtype && p.weight.size(0) == width &&
            kernel_size >= 2 && kernel_size <= kMaxConvTaps &&
            (p.bias.empty() || (p.bias.dtype() == dtype && p.bias.num_elements() == width)),
        "short_conv: out is {}, x {} {} from column {} on, weight {} and bias {}; expected [T, H], "
        "{}, [H, 2 to {}] and [H] of one dtype",
        p.out.shape_text(), name_of(dtype), p.x.shape_text(), p.first, p.weight.shape_text(),
        p.bias.shape_text(), p.silu ? "[T, H columns or more]" : "[T, 3 H]", kMaxConvTaps);
  CHECK(p.window.num_dims() == 3 && p.window.dtype() == dtype &&
            p.window.size(1) == kernel_size - 1 && p.window.size(2) == width &&
            p.pending.num_dims() == 3 && p.pending.dtype() == dtype && p.pending.size(2) == width &&
            p.folded.dtype() == DType::kI32 && p.folded.num_dims() == 2 &&
            p.folded.size(1) == width,
        "short_conv: window is {}, pending {} and folded {}; expected [slots, {}, {}], "
        "[slots, nodes, {}] and int32 [slots, {}]",
        p.window.shape_text(), p.pending.shape_text(), p.folded.shape_text(), kernel_size - 1,
        width, width, width);
  CHECK((p.commits || p.tokens.max_seq_tokens <= p.pending.size(1)) && p.tokens.first_token == 0,
        "short_conv: a decode step has {} tokens of a sequence from token {} on, expected at most "
        "{} from 0 on",
        p.tokens.max_seq_tokens, p.tokens.first_token, p.pending.size(1));
}

REGISTER_OP(short_conv, ShortConvParams)

}  // namespace cpmcu
