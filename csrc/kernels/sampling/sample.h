// From logits to tokens, one token a row, by the sampling parameters of the row's slot.
//
// Order: repetition, presence and frequency penalties; logit bias; mask; temperature; top-k; top-p
// over what top-k left; min-p relative to the most likely token. Then the Gumbel-max draw: the
// token with the largest (z - max z) / T + g, where g = -log(-log(u)) and u comes from
// Philox-4x32-10 with key `seed` and counter (token / 4, position, stream): so the draw depends on
// nothing else, neither on the batch nor on speculation. temperature 0 takes the largest logit.
// Ties go to the lower id.
//
// Filters are thresholds on the logit: tokens equal to the last one kept are kept too. Top-p sums
// probabilities as 40-bit fixed-point integers, so the order of the sum does not matter.
//
// Logits are not finite where weights or activations are not. A row with a raw logit of NaN or +inf
// draws kNoToken, and so does a row without a mask whose logits are all -inf. Its logprobs are left
// as they were.
//
// logprobs are of the raw logits (before penalties, mask and temperature): what the model says.
//
// Source: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

constexpr int kMaxLogprobs = 20;
constexpr int kNoToken = -1;  // drawn where logits are not finite: the sequence cannot go on

// One slot's sampling parameters, as they lie in device memory.
struct SlotSampling {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  int top_k = 0;  // 0: off
  uint64_t seed = 0;
  uint32_t stream = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  int use_penalties = 0;  // any of the three is on
  int use_bias = 0;
  int num_logprobs = -1;  // -1: none
};

struct TokenLogprobs {
  float logprob = 0;
  int top_ids[kMaxLogprobs] = {};
  float top_logprobs[kMaxLogprobs] = {};
};

constexpr int kPromptBit = 1 << 30;  // in counts: the token occurs in the prompt

// Words of a mask: token t is allowed if bit t % 32 of word t / 32 is set.
constexpr int num_mask_words(int vocab_size) { return (vocab_size + 31) / 32; }

struct SampleParams {
  Tensor logits;                           // [R, V] float32; may be adjusted in place
  const int* token_slots = nullptr;        // [R]
  const int* token_positions = nullptr;    // [R] position of the row; the drawn token's is one more
  const SlotSampling* sampling = nullptr;  // [slots]
  const int* counts = nullptr;             // [slots, V] times emitted, plus kPromptBit
  const float* bias = nullptr;             // [slots, V]
  // Rows of a token tree: penalties count the drafted tokens on the path from the root (left out)
  // to the row as though they had been emitted. Null: rows have no ancestors.
  const int* tree_tokens = nullptr;      // [B, N]
  const uint64_t* tree_masks = nullptr;  // [B, N] bit i: node i is an ancestor or the node itself
  int tree_size = 0;                     // N: row r is node r % N of sequence r / N
  // Rows that may draw some tokens only: row r those of masks[mask_rows[r]]; -1: all. Of other
  // tokens the logit counts as -inf. Null: no row has a mask.
  const int* mask_rows = nullptr;     // [R]
  const uint32_t* masks = nullptr;    // [M, num_mask_words(V)]
  int* tokens = nullptr;              // [R] out
  TokenLogprobs* logprobs = nullptr;  // [R] out, where the slot asks for them
};

REGISTER_OP(sample, SampleParams)

}  // namespace cpmcu
