// Inputs that the host uploads for a step, and the ring of results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/carver.h"
#include "kernels/step/step.h"
#include "kernels/step/step_ops.h"

namespace cpmcu {

// A prompt chunk of one sequence in a prefill step.
struct PrefillItem {
  int slot = 0;
  std::vector<int> ids;
  bool last = false;  // the chunk ends its prompt, so the step draws a token after it
};

// Inputs of a prefill step of B sequences and T tokens. R of the sequences draw a token.
struct PrefillInputs {
  int *ids, *positions, *token_seqs;       // [T]
  int *seq_slots, *seq_token_begin;        // [B], [B + 1]
  int *last_rows, *slot_rows;              // both [B, max_path]; DraftPrompt explains them
  int *sampled_seqs, *sampled_rows;        // [R]
  int *sampled_slots, *sampled_positions;  // [R]

  static PrefillInputs layout(Carver& carver, int max_rows, int max_seqs, int max_path);
  // Fills the arrays on the host from the items. lengths[slot]: number of cached tokens.
  void fill(const std::vector<PrefillItem>& items, const std::vector<int>& lengths,
            int max_path) const;
};

// A block of inputs: one pinned staging buffer for each step in flight, and one copy on the device.
// Uploads are ordered by the stream.
class StagedBlock {
 public:
  ~StagedBlock();
  void plan(MemoryPlan& plan, const std::string& name, int64_t num_bytes);
  void bind(const Context& ctx, const Arena& arena, int ring_size);
  void* device() const { return device_block_; }
  // The pinned copy of `step`.
  void* host(uint64_t step) const;
  void upload(const Context& ctx, uint64_t step) const;

 private:
  Device device_;
  int64_t num_bytes_ = 0;
  int ring_size_ = 1;
  MemoryPlan::Id id_ = 0;
  char* pinned_ = nullptr;
  char* device_block_ = nullptr;
};

// Results of the steps in flight. The device writes them to mapped host memory, so nothing is
// copied back.
class ResultRing {
 public:
  ~ResultRing();
  void plan(MemoryPlan& plan);
  void bind(const Context& ctx, const Arena& arena, int ring_size, int max_seqs);

  const ResultSink& sink() const { return sink_; }
  const SlotResult* entry(uint64_t step) const {
    return sink_.results + (step % sink_.ring_size) * sink_.max_seqs;
  }
  uint64_t num_done() const { return *sink_.done; }
  // Spins until step number `step` (from 0) is done. Throws if the device fails meanwhile.
  void wait(const Context& ctx, uint64_t step) const;

 private:
  Device device_;
  MemoryPlan::Id ticket_id_ = 0;
  ResultSink sink_;
};

}  // namespace cpmcu
