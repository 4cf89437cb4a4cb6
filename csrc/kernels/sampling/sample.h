// sample: draws one token for each row of logits, by the sampling parameters of the row's slot.
//
// Order of operations:
//   1. repetition, presence and frequency penalties
//   2. logit bias
//   3. mask
//   4. temperature
//   5. top-k, then top-p over the tokens that pass top-k
//   6. min-p, relative to the most likely token
//   7. the Gumbel-max draw: the token with the largest (z - max z) / T + g, g = -log(-log(u))
//
// u comes from Philox-4x32-10 with key `seed` and counter (token / 4, position, stream). Therefore
// u depends neither on the batch nor on speculation. If the temperature is 0, the largest logit is
// taken. If two tokens are equal, the lower id wins.
//
// Filters are thresholds on the logit: a token whose logit equals the threshold passes. Top-p sums
// probabilities as 40-bit fixed-point integers, so the order of the sum does not matter.
//
// If weights or activations are not finite, logits may not be finite either. A row draws kNoToken
// if a raw logit is NaN or +inf, or if the row has no mask and all its logits are -inf. Its
// log-probabilities are then not written.
//
// Log-probabilities are those of the raw logits, before penalties, bias, mask and temperature. A
// slot may name the tokens whose log-probabilities it wants.
//
// The candidates of a row are its most likely tokens after penalties, bias and mask. Lossy
// verification accepts them (docs/speculation.md).
//
// Source: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

constexpr int kMaxLogprobs = 20;
constexpr int kNoToken = -1;  // the token drawn if logits are not finite; it ends the sequence

// The sampling parameters of a slot in device memory.
struct SlotSampling {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  int top_k = 0;  // 0: top-k is off
  uint64_t seed = 0;
  uint32_t stream = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int use_penalties = 0;  // 1: at least one of the three penalties is on
  int use_bias = 0;
  int num_logprobs = -1;   // tokens to report for each drawn token; -1: no log-probabilities
  int names_logprobs = 0;  // 1: logprob_ids are the tokens to report; 0: the most likely tokens
  int logprob_ids[kMaxLogprobs] = {};
};

struct TokenLogprobs {
  float logprob = 0;
  int top_ids[kMaxLogprobs] = {};
  float top_logprobs[kMaxLogprobs] = {};
};

constexpr int kMaxCandidates = 5;

// Candidates in descending order; if two logits are equal, the lower id comes first.
struct TokenCandidates {
  // The first `num` pass top-k, top-p and min-p. At temperature 0 only the first one does.
  int num = 0;
  int ids[kMaxCandidates] = {};         // kNoToken: no other token is allowed
  float logprobs[kMaxCandidates] = {};  // written if the slot asks for log-probabilities
};

constexpr int kPromptBit = 1 << 30;  // bit of `counts`: the token occurs in the prompt

// Number of words of a mask. Token t is allowed if bit t % 32 of word t / 32 is set.
constexpr int num_mask_words(int vocab_size) { return (vocab_size + 31) / 32; }

struct SampleParams {
  Tensor logits;                     // [R, V] float32; the op may adjust it in place
  const int* token_slots = nullptr;  // [R]
  // [R] positions of the rows. A drawn token has the next position.
  const int* token_positions = nullptr;
  const SlotSampling* sampling = nullptr;  // [slots]
  const int* counts = nullptr;  // [slots, V]: how often a token was emitted, plus kPromptBit
  const float* bias = nullptr;  // [slots, V]
  // Rows of token trees, or null. Penalties also count the drafted tokens on the path from the root
  // (excluded) to the row, as if they had been emitted.
  const int* tree_tokens = nullptr;      // [B, N]
  const uint64_t* tree_masks = nullptr;  // [B, N] bit i: node i is an ancestor or the node itself
  int tree_size = 0;                     // N: row r is node r % N of sequence r / N
  // Masks, or null. Row r may draw only the tokens of masks[mask_rows[r]]; -1: all tokens. The
  // logits of other tokens count as -inf.
  const int* mask_rows = nullptr;         // [R]
  const uint32_t* masks = nullptr;        // [M, num_mask_words(V)]
  int* tokens = nullptr;                  // [R] out
  TokenLogprobs* logprobs = nullptr;      // [R] out, if the slot asks for them
  TokenCandidates* candidates = nullptr;  // [R] out, or null
};

REGISTER_OP(sample, SampleParams)

}  // namespace cpmcu
