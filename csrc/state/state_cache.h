// Which pages each sequence slot has, on the host and on the device, for all models of an engine.
//
// Page p of every plane belongs to the same slots, so one table serves the target and its drafts.
// The table's staging buffer is pinned host memory: uploads are ordered on the stream with the
// steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "state/model_state.h"
#include "state/page_pool.h"

namespace cpmcu {

class StateCache {
 public:
  StateCache() = default;
  ~StateCache();
  StateCache(const StateCache&) = delete;
  StateCache& operator=(const StateCache&) = delete;

  // Adds the state of one model, which lives as long as the cache. Call it before memory is
  // planned.
  ModelState& add_model(const std::string& scope, bool has_gaps = false);

  // `max_entries`: tokens of a slot, those of a step in flight included.
  void plan_slots(MemoryPlan& plan, int num_slots, int max_entries);
  void plan_pages(MemoryPlan& plan, int num_pages);
  int64_t page_bytes() const;  // of one page in all planes of all models
  int64_t slot_bytes() const;  // of one slot, as in ModelState, of all models
  void bind(const Context& ctx, const Arena& arena);

  const int* page_table() const { return table_; }  // [slots, max_pages] device
  int max_pages() const { return max_pages_; }      // of one slot
  int num_slots() const { return num_slots_; }
  int num_pages() const { return pool_.num_pages(); }
  int num_retiring() const { return pool_.num_retiring(); }
  // Pages without an owner. Steps in flight may still read `num_retiring` of them.
  int num_unowned() const { return pool_.num_free() + pool_.num_retiring(); }
  // Tokens that the slot's pages hold.
  int capacity(int slot) const { return static_cast<int>(pages_of(slot).size()) * kPageSize; }
  const std::vector<int>& pages_of(int slot) const { return pages_[static_cast<size_t>(slot)]; }

  // ---- verbs
  // Grows the slot to hold `num_entries` tokens; false, and nothing taken, if too few are free.
  bool reserve(const Context& ctx, int slot, int num_entries);
  // Gives an empty slot its first pages, which other owners share. The slot must never write to
  // them.
  void share(const Context& ctx, int slot, const std::vector<int>& pages);
  // Gives the slot's pages back; `num_steps` as in PagePool.
  void release(int slot, uint64_t num_steps);
  // Up to `most` free pages, each with one owner other than a slot.
  std::vector<int> take(int most);
  // Add or remove an owner of pages other than a slot, such as the prefix cache.
  void hold(const std::vector<int>& pages);
  void drop(const std::vector<int>& pages, uint64_t num_steps);
  // Copies to and from pinned memory, in stream order: a page of all models, a slot's tensors.
  void save_page(const Context& ctx, int page, char* host) const;
  void load_page(const Context& ctx, int page, const char* host) const;
  void save_slot(const Context& ctx, int slot, char* host) const;
  void load_slot(const Context& ctx, int slot, const char* host) const;
  void retire(uint64_t num_done) { pool_.retire(num_done); }
  // A new sequence in `slot`.
  void reset(const Context& ctx, int slot) const;

 private:
  void append(const Context& ctx, int slot, const std::vector<int>& pages);

  Device device_;
  int num_slots_ = 0, max_pages_ = 0;
  MemoryPlan::Id table_id_ = 0;
  int* table_ = nullptr;
  int* staging_ = nullptr;  // the table in pinned memory
  PagePool pool_;
  std::vector<std::vector<int>> pages_;  // of each slot
  std::vector<std::unique_ptr<ModelState>> models_;
};

}  // namespace cpmcu
