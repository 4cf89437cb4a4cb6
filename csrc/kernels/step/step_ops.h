// The small kernels around a step: its inputs from the slots' state, and its results back into it.
#pragma once

#include "kernels/op.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

// What the last step accepted of each slot. A drafter reads it to catch up, a block to commit.
//
// After a decode step that emitted n tokens: counts = n, ids[j] the j-th of them, paths[j] the
// node (row of the slot's tree) that drew it. After a prefill that drew a token: counts = 1,
// ids[0] = the token, paths[0] = -1, since a prefill has no nodes. Paths are -1 beyond their end.
struct Accepted {
  int max_path = 0;       // D + 1: longest path, root included
  int* ids = nullptr;     // [slots, max_path]
  int* paths = nullptr;   // [slots, max_path]
  int* counts = nullptr;  // [slots]
};

// Per-slot state in device memory.
struct SlotState {
  int* lengths = nullptr;      // [slots] cached tokens
  int* next_tokens = nullptr;  // [slots] emitted, not yet cached
  int* counts = nullptr;       // [slots, V] times emitted, plus kPromptBit; null: not kept
  int* history = nullptr;      // [slots, max_len] the cached tokens, or null: not kept
  int max_len = 0;
  int vocab_size = 0;
  Accepted accepted;
};

// One sequence's part of a step's result, in host memory that the device writes.
struct SlotResult {
  int slot = 0;
  int num_tokens = 0;
  int finished = 0;  // the device ended the sequence (kernels/tree/tree.h)
  int tokens[kMaxTreeSize] = {};
  TokenLogprobs logprobs[kMaxTreeSize] = {};
};

// Where a step leaves its results: result r of the step in results[(old *ticket % ring_size) *
// max_seqs + r]. Then `*ticket` grows by one, and `*done` is set to it with system scope. So step
// n, from 1, leaves its results in entry (n - 1) % ring_size, and the host polls for `*done` >= n.
struct ResultSink {
  SlotResult* results = nullptr;  // mapped host memory, [ring_size, max_seqs]
  int ring_size = 1;
  int max_seqs = 1;
  uint64_t* step_counter = nullptr;   // device memory; null: the step publishes nothing
  volatile uint64_t* done = nullptr;  // mapped host memory
};

// After a prefill: history gets the rows' ids, lengths[slot] += its rows. A drawn token becomes
// next_tokens[slot] and accepted, is counted (if the slot uses penalties and it is not kNoToken),
// and is published: result r is that of sampled_seqs[r]. logprobs[0] is copied only where the slot
// asks for it.
struct FinishStepParams {
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1]
  int num_seqs = 0;
  int num_tokens = 0;                       // T
  const int* ids = nullptr;                 // [T]
  const int* token_seqs = nullptr;          // [T]
  const int* sampled_seqs = nullptr;        // [R] indices into B of the sequences that drew a token
  int num_sampled = 0;                      // R
  const int* tokens = nullptr;              // [R]
  const TokenLogprobs* logprobs = nullptr;  // [R]
  const SlotSampling* sampling = nullptr;   // [slots]
  SlotState state;
  ResultSink sink;
};
REGISTER_OP(finish_step, FinishStepParams)

// A new sequence in a slot: lengths = 0, counts cleared, then prompt ids marked with kPromptBit and
// generated ids counted.
struct ResetSlotParams {
  int slot = 0;
  SlotState state;
  const int* ids = nullptr;  // [num_ids] device memory
  int num_ids = 0;
  int num_prompt = 0;  // the first num_prompt of ids are the prompt
};
REGISTER_OP(reset_slot, ResetSlotParams)

}  // namespace cpmcu
