// The pages of an engine: who owns which, and their copies in host memory.
//
// Slots own pages, and so does the prefix cache. A page without owners is free once no step in
// flight may read it. The stream orders the copies after all steps enqueued so far. Groups of
// layers have pages of their own (state/state_cache.h): `group` is 0 for layers without a window.
#pragma once

#include <functional>
#include <vector>

#include "core/context.h"
#include "engine/batch.h"
#include "state/host_blocks.h"
#include "state/state_cache.h"

namespace cpmcu {

class Pages {
 public:
  // `num_steps`: steps enqueued so far. `rank` of `num_ranks` owns these parts of the pages.
  // All references must outlive this object.
  Pages(const DeviceContext& ctx, StateCache& states, const ResultRing& ring,
        const uint64_t& num_steps, int rank, int num_ranks)
      : ctx_(ctx),
        states_(states),
        ring_(ring),
        num_steps_(num_steps),
        rank_(rank),
        num_ranks_(num_ranks) {}

  // ---- groups
  int num_groups() const { return states_.num_groups(); }
  int window(int group) const { return states_.group(group).window(); }
  int num_pages(int group) const { return states_.group(group).pool().num_pages(); }
  // The first page of a sequence that a token at position `length` or later reads.
  int first_read(int group, int length) const { return states_.group(group).first_read(length); }

  // The first `num_steps` steps are done, so the pages that only they read are free. All ranks call
  // it at the same places. If each asked its own device, they would free different pages.
  void steps_done(uint64_t num_steps);

  // ---- owners
  const HeldPages& of_slot(int slot, int group) const;
  int num_owners(int page, int group) const;
  // Grows a slot to `num_entries` tokens in group 0; false if too few pages are free. If only steps
  // in flight still read the needed pages, waits for these steps.
  bool reserve(int slot, int num_entries);
  // The same in the groups with a window: pages for all entries up to `num_entries` that a token at
  // position `length` or later reads. The pages before them are given back.
  bool reserve_windows(int slot, int length, int num_entries);
  void release(int slot);  // gives back all pages of the slot
  // Up to `most` free pages, each with one owner.
  std::vector<int> take(int most, int group);
  void hold(const std::vector<int>& pages, int group);  // adds an owner to each page
  void drop(const std::vector<int>& pages, int group);  // removes an owner from each page

  // ---- copies of pages, and of the per-slot tensors of a slot. A block holds the parts of all
  // ranks, in their order.
  void save(const std::vector<int>& pages, const HostBlocks& to, const std::vector<int>& blocks,
            int group);
  void load(const std::vector<int>& pages, const HostBlocks& from, const std::vector<int>& blocks,
            int group);
  void save_slot(int slot, const HostBlocks& to, int block);
  void load_slot(int slot, const HostBlocks& from, int block);
  void wait_for_copies();  // waits for all steps in flight, too
  // Were copies enqueued since the last wait? If so, only the stream may touch their blocks.
  bool has_copies() const { return has_copies_; }
  int64_t page_bytes(int group) const { return num_ranks_ * states_.page_bytes(group); }
  int64_t slot_bytes() const { return num_ranks_ * states_.slot_bytes(); }

 private:
  bool take_or_wait(const std::function<bool()>& take);
  void begin_copy(int64_t block_bytes, int64_t bytes, size_t num_from, size_t num_to);
  void check_slot(int slot) const;
  char* own_part(const HostBlocks& blocks, int block, int64_t bytes) const {
    return blocks.block(block) + rank_ * bytes;
  }

  const DeviceContext& ctx_;
  StateCache& states_;
  const ResultRing& ring_;
  const uint64_t& num_steps_;
  const int rank_, num_ranks_;
  uint64_t num_done_ = 0;  // number of steps known to be done
  bool has_copies_ = false;
};

}  // namespace cpmcu
