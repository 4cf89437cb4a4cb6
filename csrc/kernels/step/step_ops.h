// Per-slot state on the device, the results of a step, and the small ops that update both.
#pragma once

#include "kernels/op.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

// Per-slot state in device memory.
struct SlotState {
  int* lengths = nullptr;      // [slots] number of cached tokens
  int* next_tokens = nullptr;  // [slots] last emitted token, not yet cached
  // [slots] tokens at the start of the sequence in shared pages; null: none.
  int* num_shared = nullptr;
  // [slots, V]: how often a token was emitted, plus kPromptBit; null: not stored.
  int* counts = nullptr;
  int* history = nullptr;  // [slots, max_len] the cached tokens; null: not stored
  int max_len = 0;
  int vocab_size = 0;
  Accepted accepted;
};

// Steps that a draft took itself ("inner" steps, kernels/tree/inner_step.h), and what they emitted.
struct InnerCounts {
  int steps = 0;
  int tokens = 0;
};

// The result of a step for one sequence, in mapped host memory.
struct SlotResult {
  int slot = 0;
  int num_tokens = 0;
  int finished = 0;   // 1: the device ended the sequence (SlotStop of kernels/tree/tree.h)
  InnerCounts inner;  // speculative steps that the step's draft took itself
  int tokens[kMaxTreeSize] = {};
  TokenLogprobs logprobs[kMaxTreeSize] = {};
};

// The ring that receives the results of steps. Steps are counted from 1.
//
// Step n writes result r to results[((n - 1) % ring_size) * max_seqs + r]. It then sets
// `*step_counter` to n, and `*done` to n by a release store with system scope. The host polls for
// `*done` >= n.
struct ResultSink {
  SlotResult* results = nullptr;  // mapped host memory, [ring_size, max_seqs]
  int ring_size = 1;
  int max_seqs = 1;
  // Number of published steps, in device memory. Null: the step publishes nothing.
  uint64_t* step_counter = nullptr;
  volatile uint64_t* done = nullptr;  // in mapped host memory: number of the last step that is done
};

// Updates the state of the slots after a prefill:
//   * The ids of the step are appended to history. lengths[slot] grows by the slot's tokens.
//   * A drawn token becomes next_tokens[slot] and the slot's accepted token.
//   * If the slot uses penalties and the drawn token is not kNoToken, counts is incremented.
//   * Result r, of sequence sampled_seqs[r], is published. If the slot asks for log-probabilities,
//     logprobs[0] is written.
struct FinishStepParams {
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1]
  int num_seqs = 0;
  int num_tokens = 0;                 // T
  const int* ids = nullptr;           // [T]
  const int* token_seqs = nullptr;    // [T]
  const int* sampled_seqs = nullptr;  // [R] numbers of the sequences (0..B-1) that drew a token
  int num_sampled = 0;                // R
  const int* tokens = nullptr;        // [R]
  const TokenLogprobs* logprobs = nullptr;  // [R]
  const SlotSampling* sampling = nullptr;   // [slots]
  SlotState state;
  ResultSink sink;
};
REGISTER_OP(finish_step, FinishStepParams)

// Starts a new sequence in a slot. Sets lengths and num_shared to `num_cached` and clears counts.
// Then marks the prompt ids with kPromptBit and counts the generated ids.
struct ResetSlotParams {
  int slot = 0;
  SlotState state;
  const int* ids = nullptr;  // [num_ids] in device memory: the prompt, then generated tokens
  int num_ids = 0;
  int num_prompt = 0;  // the first num_prompt of `ids` are the prompt
  int num_cached = 0;  // tokens whose keys and values are in the cache already
};
REGISTER_OP(reset_slot, ResetSlotParams)

}  // namespace cpmcu
