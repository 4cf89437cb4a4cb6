// The pages of each sequence slot, on the host and on the device, for all models of an engine.
//
// Layers with the same window are a group with pages and a page table of its own. Group 0 has the
// layers without a window, of the target and of its drafts. Page p of every plane of a group
// belongs to the same slots. The tables' staging buffer is pinned host memory: uploads are ordered
// on the stream with the steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "state/model_state.h"
#include "state/page_group.h"

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
  // The state of a model that was added before.
  ModelState& model(const std::string& scope) const;

  // `max_entries`: tokens of a slot, those of a step in flight included.
  void plan_slots(MemoryPlan& plan, int num_slots, int max_entries);
  // num_pages of each group.
  void plan_pages(MemoryPlan& plan, const std::vector<int64_t>& num_pages);
  int64_t page_bytes(int group) const;  // bytes of one page in all planes of all models
  int64_t slot_bytes() const;           // bytes of one slot in all models, as in ModelState
  void bind(const Context& ctx, const Arena& arena);
  void clear_slots(const Context& ctx);
  void clear_pages(const Context& ctx);  // called after the weights are loaded

  // In device memory: [slots, max_pages] of group 0.
  const int* page_table() const { return table_; }
  int max_pages() const { return max_pages_; }  // maximum number of pages of one slot
  int num_slots() const { return num_slots_; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  const PageGroup& group(int group) const { return groups_.at(static_cast<size_t>(group)); }
  // Tokens that the slot's pages of group 0 hold.
  int capacity(int slot) const { return groups_[0].of_slot(slot).end() * kPageSize; }

  // ---- verbs
  // Grows the slot to hold `num_entries` tokens in group 0; false, and nothing taken, if too few
  // pages are free.
  bool reserve(const Context& ctx, int slot, int num_entries, uint64_t num_steps);
  // PageGroup::reserve in the groups with a window.
  bool reserve_windows(const Context& ctx, int slot, int length, int num_entries,
                       uint64_t num_steps);
  // Gives an empty slot pages that other owners share, in each group. The slot must never write to
  // them.
  void share(const Context& ctx, int slot, const std::vector<HeldPages>& pages);
  // Gives the slot's pages back; `num_steps` as in PagePool.
  void release(int slot, uint64_t num_steps);
  // Up to `most` free pages of a group, each with one owner other than a slot.
  std::vector<int> take(int group, int most);
  // Add or remove an owner of a group's pages other than a slot, such as the prefix cache.
  void hold(int group, const std::vector<int>& pages);
  void drop(int group, const std::vector<int>& pages, uint64_t num_steps);
  // Copies to and from pinned memory, in stream order: a group's page of all models, a slot's
  // tensors.
  void save_page(const Context& ctx, int group, int page, char* host) const;
  void load_page(const Context& ctx, int group, int page, const char* host) const;
  void save_slot(const Context& ctx, int slot, char* host) const;
  void load_slot(const Context& ctx, int slot, const char* host) const;
  void retire(uint64_t num_done);
  int num_retiring() const;  // number of retiring pages of all groups
  // Prepares `slot` for a new sequence.
  void reset(const Context& ctx, int slot) const;

 private:
  int64_t table_size() const { return int64_t{num_slots_} * max_pages_; }
  bool grow(const Context& ctx, int group, int slot, int length, int num_entries,
            uint64_t num_steps);
  void upload(const Context& ctx, int group, int slot, int first);

  Device device_;
  int num_slots_ = 0, max_pages_ = 0;
  MemoryPlan::Id table_id_ = 0;
  int* table_ = nullptr;    // [groups, slots, max_pages]
  int* staging_ = nullptr;  // the tables in pinned memory
  std::vector<PageGroup> groups_;
  std::vector<std::unique_ptr<ModelState>> models_;
};

}  // namespace cpmcu
