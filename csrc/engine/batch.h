// A step's inputs and the slots' state in device memory, and the ring its results come back
// through.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "kernels/step.h"
#include "kernels/step_ops.h"
#include "layers/kv_cache.h"

namespace cpmcu {

// A prompt chunk of one sequence in a prefill step.
struct PrefillItem {
  int slot = 0;
  std::vector<int> ids;
  bool last = false;  // of its prompt: a token is drawn after it
};

// Inputs of prefill steps, filled on the host and uploaded in one copy. Each step in flight has a
// pinned block of its own; the device has one block, ordered by the stream.
class StepInputs {
 public:
  ~StepInputs();
  void plan(MemoryPlan& plan, const std::string& name, int max_rows, int max_seqs);
  void bind(const Context& ctx, const Arena& arena, int ring_size);

  struct Device {
    int *ids, *positions, *row_seqs;         // [T]
    int *seq_slots, *seq_row_begin;          // [B], [B + 1]
    int *sampled_seqs, *sampled_rows;        // [R]
    int *sampled_slots, *sampled_positions;  // [R]
  };
  const Device& device() const { return device_block_; }

  // Fills pinned block `ticket % ring_size` from the items and uploads it. lengths[slot] are the
  // cached tokens. Returns the number of sequences that draw a token, R.
  int upload_prefill(const Context& ctx, uint64_t ticket, const std::vector<PrefillItem>& items,
                     const std::vector<int>& lengths);
  // Uploads the slots of a decode step.
  void upload_slots(const Context& ctx, uint64_t ticket, const std::vector<int>& slots);

 private:
  Device carve(int* base) const;
  int64_t num_words() const { return int64_t{3} * max_rows_ + 6 * max_seqs_ + 1; }

  cpmcu::Device where_;
  int max_rows_ = 0, max_seqs_ = 0, ring_size_ = 1;
  MemoryPlan::Id id_ = 0;
  int* pinned_ = nullptr;
  int* base_ = nullptr;
  Device device_block_{};
};

// Results of the steps in flight, in host memory that the device writes; nothing is copied back.
class ResultRing {
 public:
  ~ResultRing();
  void plan(MemoryPlan& plan);
  void bind(const Context& ctx, const Arena& arena, int ring_size, int max_seqs);

  int ring_size() const { return ring_size_; }
  int max_seqs() const { return max_seqs_; }
  SlotResult* results() const { return results_; }
  uint64_t* ticket() const { return ticket_; }
  volatile uint64_t* done() const { return done_; }
  const SlotResult* entry(uint64_t step) const {
    return results_ + (step % ring_size_) * max_seqs_;
  }
  // Spins until step number `step` (from 0) is done. Throws if the device fails meanwhile.
  void wait(const Context& ctx, uint64_t step) const;

 private:
  Device device_;
  int ring_size_ = 1, max_seqs_ = 1;
  MemoryPlan::Id ticket_id_ = 0;
  uint64_t* ticket_ = nullptr;         // device memory
  SlotResult* results_ = nullptr;      // [ring_size, max_seqs], mapped
  volatile uint64_t* done_ = nullptr;  // mapped
};

}  // namespace cpmcu
