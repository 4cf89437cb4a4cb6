// The small kernels around a step: its inputs from the slots' state, and its results back into it.
#pragma once

#include "kernels/op.h"
#include "kernels/sample.h"
#include "kernels/step_rows.h"

namespace cpmcu {

// Per-slot state in device memory.
struct SlotState {
  int* lengths = nullptr;      // [slots] cached tokens
  int* next_tokens = nullptr;  // [slots] emitted, not yet cached
  int* counts = nullptr;       // [slots, V]
  int* history = nullptr;      // [slots, max_len] the cached tokens, or null: not kept
  int max_len = 0;
  int vocab_size = 0;
};

// One sequence's part of a step's result, in host memory that the device writes.
struct SlotResult {
  int slot = 0;
  int num_tokens = 0;
  int finished = 0;  // the device ended the sequence (kernels/tree.h)
  int tokens[kMaxTreeSize] = {};
  TokenLogprobs logprobs[kMaxTreeSize] = {};
};

// Rows of a plain decode step: ids[b] = next_tokens[slot], positions[b] = lengths[slot].
struct BeginDecodeParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  SlotState state;
  int* ids = nullptr;            // [B] out
  int* positions = nullptr;      // [B] out
  int* row_seqs = nullptr;       // [B] out: 0..B-1
  int* seq_row_begin = nullptr;  // [B + 1] out: 0..B
};
REGISTER_OP(begin_decode, BeginDecodeParams)

// After a step: lengths[slot] += its rows; where a token was drawn it becomes next_tokens[slot], is
// counted (if the slot uses penalties and it is not kNoToken), and is published: its result is
// written (into the ring entry of the old ticket), `*ticket` grows by one, and `*done` is set to
// the new ticket with system scope. So step n, from 1, leaves its results in entry (n - 1) %
// ring_size, and the host polls for `*done` >= n. logprobs[0] is copied only where the slot asks
// for logprobs.
struct FinishStepParams {
  const int* seq_slots = nullptr;      // [B]
  const int* seq_row_begin = nullptr;  // [B + 1]
  int num_seqs = 0;
  const int* sampled_seqs = nullptr;        // [R] indices into B of the sequences that drew a token
  int num_sampled = 0;                      // R
  const int* tokens = nullptr;              // [R]
  const TokenLogprobs* logprobs = nullptr;  // [R]
  const SlotSampling* sampling = nullptr;   // [slots]
  SlotState state;
  // Results go to results[(old *ticket % ring_size) * max_seqs + r], r in 0..R-1.
  SlotResult* results = nullptr;  // mapped host memory, [ring_size, max_seqs]
  int ring_size = 1;
  int max_seqs = 1;
  uint64_t* ticket = nullptr;         // device memory
  volatile uint64_t* done = nullptr;  // mapped host memory
};
REGISTER_OP(finish_step, FinishStepParams)

// After the first token of a sequence: pending_ids[slot, 0] = tokens[r], pending_counts[slot] = 1.
struct SeedPendingParams {
  const int* sampled_slots = nullptr;  // [R]
  int num_sampled = 0;
  const int* tokens = nullptr;    // [R]
  int max_pending = 0;            // D + 1
  int* pending_ids = nullptr;     // [slots, D + 1]
  int* pending_counts = nullptr;  // [slots]
};
REGISTER_OP(seed_pending, SeedPendingParams)

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
