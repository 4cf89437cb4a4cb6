#include "engine/batch.h"

#include <atomic>
#include <cstring>
#include <thread>

namespace cpmcu {

StepInputs::~StepInputs() {
  if (pinned_ != nullptr) release_pinned(where_, pinned_);
}

void StepInputs::plan(MemoryPlan& plan, const std::string& name, int max_rows, int max_seqs) {
  max_rows_ = max_rows, max_seqs_ = max_seqs;
  id_ = plan.add(name, "state", 4 * num_words());
}

void StepInputs::bind(const Context& ctx, const Arena& arena, int ring_size) {
  where_ = ctx.device;
  ring_size_ = ring_size;
  base_ = arena.array<int>(id_);
  device_block_ = carve(base_);
  pinned_ = static_cast<int*>(allocate_pinned(ctx.device, 4 * num_words() * ring_size));
}

StepInputs::Device StepInputs::carve(int* base) const {
  Device block{};
  const auto take = [&](int count) {
    int* at = base;
    base += count;
    return at;
  };
  block.seq_slots = take(max_seqs_);
  block.seq_row_begin = take(max_seqs_ + 1);
  block.sampled_seqs = take(max_seqs_);
  block.sampled_rows = take(max_seqs_);
  block.sampled_slots = take(max_seqs_);
  block.sampled_positions = take(max_seqs_);
  block.ids = take(max_rows_);
  block.positions = take(max_rows_);
  block.row_seqs = take(max_rows_);
  return block;
}

int StepInputs::upload_prefill(const Context& ctx, uint64_t ticket,
                               const std::vector<PrefillItem>& items,
                               const std::vector<int>& lengths) {
  int* base =
      pinned_ + static_cast<int64_t>(ticket % static_cast<uint64_t>(ring_size_)) * num_words();
  const Device host = carve(base);
  int row = 0, seq = 0, num_sampled = 0;
  for (const PrefillItem& item : items) {
    host.seq_slots[seq] = item.slot;
    host.seq_row_begin[seq] = row;
    for (int position = lengths[static_cast<size_t>(item.slot)]; int id : item.ids) {
      host.ids[row] = id;
      host.positions[row] = position++;
      host.row_seqs[row++] = seq;
    }
    if (item.last) {
      host.sampled_seqs[num_sampled] = seq;
      host.sampled_rows[num_sampled] = row - 1;
      host.sampled_slots[num_sampled] = item.slot;
      host.sampled_positions[num_sampled++] = host.positions[row - 1];
    }
    ++seq;
  }
  host.seq_row_begin[seq] = row;
  copy_to_device(ctx.device, base_, base, 4 * num_words(), ctx.stream);
  return num_sampled;
}

void StepInputs::upload_slots(const Context& ctx, uint64_t ticket, const std::vector<int>& slots) {
  int* base =
      pinned_ + static_cast<int64_t>(ticket % static_cast<uint64_t>(ring_size_)) * num_words();
  const Device host = carve(base);
  std::memcpy(host.seq_slots, slots.data(), 4 * slots.size());
  // A decode step draws one token a sequence, in order.
  for (size_t i = 0; i < slots.size(); ++i) host.sampled_seqs[i] = static_cast<int>(i);
  const int64_t words = host.sampled_rows - base;
  copy_to_device(ctx.device, base_, base, 4 * words, ctx.stream);
}

ResultRing::~ResultRing() {
  if (results_ != nullptr) release_pinned(device_, results_);
  if (done_ != nullptr) release_pinned(device_, const_cast<uint64_t*>(done_));
}

void ResultRing::plan(MemoryPlan& plan) {
  ticket_id_ = plan.add("step_ticket", "state", sizeof(uint64_t));
}

void ResultRing::bind(const Context& ctx, const Arena& arena, int ring_size, int max_seqs) {
  device_ = ctx.device;
  ring_size_ = ring_size, max_seqs_ = max_seqs;
  ticket_ = arena.array<uint64_t>(ticket_id_);
  const int64_t bytes = static_cast<int64_t>(sizeof(SlotResult)) * ring_size * max_seqs;
  results_ = static_cast<SlotResult*>(allocate_pinned(ctx.device, bytes));
  done_ = static_cast<volatile uint64_t*>(allocate_pinned(ctx.device, sizeof(uint64_t)));
  *done_ = 0;
  fill_bytes(ctx.device, ticket_, 0, sizeof(uint64_t), ctx.stream);
}

void ResultRing::wait(const Context& ctx, uint64_t step) const {
  // Spinning keeps the latency at a few microseconds; now and then the stream is asked, because a
  // step that failed never gets done.
  for (int spins = 0; *done_ <= step; ++spins) {
    if (spins % 4096 == 4095) {
      const bool idle = query(ctx.device, ctx.stream);
      CHECK_STATE(!idle || *done_ > step, "step {} ended without a result", step);
      std::this_thread::yield();
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
}

}  // namespace cpmcu
