#include "engine/pages.h"

#include <algorithm>

namespace cpmcu {

void Pages::steps_done(uint64_t num_steps) {
  num_done_ = std::max(num_done_, num_steps);
  states_.retire(num_done_);
}

// ---- owners

const HeldPages& Pages::of_slot(int slot, int group) const {
  check_slot(slot);
  return states_.group(group).of_slot(slot);
}

int Pages::num_owners(int page, int group) const {
  return states_.group(group).pool().num_owners(page);
}

bool Pages::reserve(int slot, int num_entries) {
  return take_or_wait([&] { return states_.reserve(ctx_, slot, num_entries, num_steps_); });
}

bool Pages::reserve_windows(int slot, int length, int num_entries) {
  if (num_groups() == 1) return true;
  return take_or_wait(
      [&] { return states_.reserve_windows(ctx_, slot, length, num_entries, num_steps_); });
}

bool Pages::take_or_wait(const std::function<bool()>& take) {
  set_device(ctx_.device);
  if (take()) return true;
  if (states_.num_retiring() == 0) return false;
  if (num_steps_ > 0) ring_.wait(ctx_, num_steps_ - 1);
  steps_done(num_steps_);
  return take();
}

void Pages::release(int slot) {
  states_.release(slot, num_steps_);
  steps_done(num_done_);
}

std::vector<int> Pages::take(int most, int group) { return states_.take(group, most); }

void Pages::hold(const std::vector<int>& pages, int group) { states_.hold(group, pages); }

void Pages::drop(const std::vector<int>& pages, int group) {
  states_.drop(group, pages, num_steps_);
  steps_done(num_done_);
}

// ---- copies

void Pages::save(const std::vector<int>& pages, const HostBlocks& to,
                 const std::vector<int>& blocks, int group) {
  begin_copy(to.block_bytes(), page_bytes(group), pages.size(), blocks.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    states_.save_page(ctx_, group, pages[i], own_part(to, blocks[i], states_.page_bytes(group)));
  }
}

void Pages::load(const std::vector<int>& pages, const HostBlocks& from,
                 const std::vector<int>& blocks, int group) {
  begin_copy(from.block_bytes(), page_bytes(group), pages.size(), blocks.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    states_.load_page(ctx_, group, pages[i], own_part(from, blocks[i], states_.page_bytes(group)));
  }
}

void Pages::save_slot(int slot, const HostBlocks& to, int block) {
  check_slot(slot);
  begin_copy(to.block_bytes(), slot_bytes(), 1, 1);
  states_.save_slot(ctx_, slot, own_part(to, block, states_.slot_bytes()));
}

void Pages::load_slot(int slot, const HostBlocks& from, int block) {
  check_slot(slot);
  begin_copy(from.block_bytes(), slot_bytes(), 1, 1);
  states_.load_slot(ctx_, slot, own_part(from, block, states_.slot_bytes()));
}

void Pages::wait_for_copies() {
  set_device(ctx_.device);
  synchronize(ctx_.device, ctx_.stream);
  has_copies_ = false;
}

void Pages::begin_copy(int64_t block_bytes, int64_t bytes, size_t num_from, size_t num_to) {
  CHECK(block_bytes >= bytes && num_from == num_to,
        "{} pieces of state of {} bytes are copied to or from {} blocks of {} bytes", num_from,
        bytes, num_to, block_bytes);
  set_device(ctx_.device);
  has_copies_ = true;
}

void Pages::check_slot(int slot) const {
  CHECK(slot >= 0 && slot < states_.num_slots(), "slot {} is asked for, the engine has {}", slot,
        states_.num_slots());
}

}  // namespace cpmcu
