// Log-probabilities of one row of logits on the host, for tokens that the prompt gives: the sampler
// reports those of the tokens that it draws itself.
#pragma once

#include "kernels/sampling/sample.h"

namespace cpmcu {

// Of `token` and of the `num_top` likeliest tokens (ties: the lower id first) under the softmax of
// logits [vocab_size]. num_top is at most kMaxLogprobs.
TokenLogprobs token_logprobs(const float* logits, int vocab_size, int token, int num_top);

}  // namespace cpmcu
