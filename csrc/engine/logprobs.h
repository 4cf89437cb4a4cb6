// Log-probabilities of prompt tokens, computed on the host from one row of logits. For drawn tokens
// the sampler reports them.
#pragma once

#include "kernels/sampling/sample.h"

namespace cpmcu {

// Log-probabilities of `token` and of the `num_top` likeliest tokens (ties: the lower id first)
// under the softmax of logits [vocab_size]. num_top is at most kMaxLogprobs.
TokenLogprobs token_logprobs(const float* logits, int vocab_size, int token, int num_top);

}  // namespace cpmcu
