#include "engine/batch.h"

#include <atomic>
#include <thread>

namespace cpmcu {

PrefillInputs PrefillInputs::layout(Carver& carver, int max_rows, int max_seqs, int max_path) {
  const auto ints = [&](int64_t count) { return carver.take<int>(count); };
  PrefillInputs inputs{};
  inputs.ids = ints(max_rows);
  inputs.positions = ints(max_rows);
  inputs.token_seqs = ints(max_rows);
  inputs.seq_slots = ints(max_seqs);
  inputs.seq_token_begin = ints(max_seqs + 1);
  inputs.last_rows = ints(int64_t{max_seqs} * max_path);
  inputs.slot_rows = ints(int64_t{max_seqs} * max_path);
  inputs.sampled_seqs = ints(max_seqs);
  inputs.sampled_rows = ints(max_seqs);
  inputs.sampled_slots = ints(max_seqs);
  inputs.sampled_positions = ints(max_seqs);
  return inputs;
}

void PrefillInputs::fill(const std::vector<PrefillItem>& items, const std::vector<int>& lengths,
                         int max_path) const {
  int row = 0, seq = 0, num_sampled = 0;
  for (const PrefillItem& item : items) {
    seq_slots[seq] = item.slot;
    seq_token_begin[seq] = row;
    for (int position = lengths[static_cast<size_t>(item.slot)]; int id : item.ids) {
      ids[row] = id;
      positions[row] = position++;
      token_seqs[row++] = seq;
    }
    const Accepted accepted{.max_path = max_path};
    for (int i = 0; i < max_path; ++i) {
      const int last = row - 1 - i, at = seq * max_path + i;
      const bool exists = last >= seq_token_begin[seq];
      last_rows[at] = exists ? last : -1;
      slot_rows[at] = exists ? accepted.hidden_row(item.slot, positions[last]) : -1;
    }
    if (item.last) {
      sampled_seqs[num_sampled] = seq;
      sampled_rows[num_sampled] = row - 1;
      sampled_slots[num_sampled] = item.slot;
      sampled_positions[num_sampled++] = positions[row - 1];
    }
    ++seq;
  }
  seq_token_begin[seq] = row;
}

StagedBlock::~StagedBlock() {
  if (pinned_ != nullptr) release_pinned(device_, pinned_);
}

void StagedBlock::plan(MemoryPlan& plan, const std::string& name, int64_t num_bytes) {
  num_bytes_ = num_bytes;
  id_ = plan.add(name, "state", num_bytes);
}

void StagedBlock::bind(const Context& ctx, const Arena& arena, int ring_size) {
  device_ = ctx.device;
  ring_size_ = ring_size;
  device_block_ = arena.array<char>(id_);
  pinned_ = static_cast<char*>(allocate_pinned(ctx.device, num_bytes_ * ring_size));
}

void* StagedBlock::host(uint64_t step) const {
  return pinned_ + static_cast<int64_t>(step % static_cast<uint64_t>(ring_size_)) * num_bytes_;
}

void StagedBlock::upload(const Context& ctx, uint64_t step) const {
  copy_to_device(ctx.device, device_block_, host(step), num_bytes_, ctx.stream);
}

ResultRing::~ResultRing() {
  if (sink_.results != nullptr) release_pinned(device_, sink_.results);
  if (sink_.done != nullptr) release_pinned(device_, const_cast<uint64_t*>(sink_.done));
}

void ResultRing::plan(MemoryPlan& plan) {
  ticket_id_ = plan.add("step_ticket", "state", sizeof(uint64_t));
}

void ResultRing::bind(const Context& ctx, const Arena& arena, int ring_size, int max_seqs) {
  device_ = ctx.device;
  sink_.ring_size = ring_size;
  sink_.max_seqs = max_seqs;
  sink_.step_counter = arena.array<uint64_t>(ticket_id_);
  const int64_t bytes = static_cast<int64_t>(sizeof(SlotResult)) * ring_size * max_seqs;
  sink_.results = static_cast<SlotResult*>(allocate_pinned(ctx.device, bytes));
  sink_.done = static_cast<volatile uint64_t*>(allocate_pinned(ctx.device, sizeof(uint64_t)));
  *sink_.done = 0;
  fill_bytes(ctx.device, sink_.step_counter, 0, sizeof(uint64_t), ctx.stream);
}

void ResultRing::wait(const Context& ctx, uint64_t step) const {
  // Spinning keeps the latency at a few microseconds. A failed step never sets `done`, so the loop
  // also queries the stream now and then.
  for (int spins = 0; *sink_.done <= step; ++spins) {
    if (spins % 4096 == 4095) {
      const bool idle = query(ctx.device, ctx.stream);
      CHECK_STATE(!idle || *sink_.done > step, "step {} ended without a result", step);
      std::this_thread::yield();
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
}

}  // namespace cpmcu
