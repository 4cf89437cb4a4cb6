// The pages of an engine: who owns which, and their copies in host memory.
//
// Slots own pages, and so does the prefix cache. A page without owners is free once no step in
// flight may read it. The stream orders the copies after all steps enqueued so far.
#pragma once

#include <vector>

#include "core/context.h"
#include "engine/batch.h"
#include "state/host_blocks.h"
#include "state/state_cache.h"

namespace cpmcu {

class Pages {
 public:
  // `num_steps`: steps enqueued so far. All arguments must outlive this object.
  Pages(const DeviceContext& ctx, StateCache& states, const ResultRing& ring,
        const uint64_t& num_steps)
      : ctx_(ctx), states_(states), ring_(ring), num_steps_(num_steps) {}

  // ---- owners
  std::vector<int> of_slot(int slot) const;
  // Grows a slot to `num_entries` tokens; false if too few pages are free. If only steps in flight
  // still read the needed pages, waits for these steps.
  bool reserve(int slot, int num_entries);
  void release(int slot);                    // all pages of the slot
  std::vector<int> take(int most);           // up to `most` free pages, each with one owner
  void hold(const std::vector<int>& pages);  // one more owner of each
  void drop(const std::vector<int>& pages);  // one owner less

  // ---- copies of pages, and of the per-slot tensors of a slot
  void save(const std::vector<int>& pages, const HostBlocks& to, const std::vector<int>& blocks);
  void load(const std::vector<int>& pages, const HostBlocks& from, const std::vector<int>& blocks);
  void save_slot(int slot, const HostBlocks& to, int block);
  void load_slot(int slot, const HostBlocks& from, int block);
  void wait_for_copies();  // and for all steps in flight
  // Were copies enqueued since the last wait? If so, only the stream may touch their blocks.
  bool has_copies() const { return has_copies_; }
  int64_t page_bytes() const { return states_.page_bytes(); }
  int64_t slot_bytes() const { return states_.slot_bytes(); }

 private:
  void begin_copy(int64_t block_bytes, int64_t bytes, size_t num_from, size_t num_to);
  void check_slot(int slot) const;

  const DeviceContext& ctx_;
  StateCache& states_;
  const ResultRing& ring_;
  const uint64_t& num_steps_;
  bool has_copies_ = false;
};

}  // namespace cpmcu
