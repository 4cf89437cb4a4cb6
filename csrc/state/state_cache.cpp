#include "state/state_cache.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace cpmcu {

StateCache::~StateCache() {
  if (staging_ != nullptr) release_pinned(device_, staging_);
}

ModelState& StateCache::add_model(const std::string& scope, bool has_gaps) {
  models_.push_back(std::make_unique<ModelState>(scope, has_gaps));
  return *models_.back();
}

ModelState& StateCache::model(const std::string& scope) const {
  const auto found =
      std::ranges::find_if(models_, [&](const auto& model) { return model->scope() == scope; });
  CHECK_STATE(found != models_.end(), "no model \"{}\" was added", scope);
  return **found;
}

void StateCache::plan_slots(MemoryPlan& plan, int num_slots, int max_entries) {
  num_slots_ = num_slots;
  max_pages_ = pages_for(max_entries);
  std::set<int> windows{0};
  for (const auto& model : models_) {
    for (int window : model->windows()) windows.insert(window);
  }
  groups_.clear();
  for (int window : windows) groups_.emplace_back(window);
  table_id_ = plan.add("page_table", "state", 4 * num_groups() * table_size());
  for (const auto& model : models_) model->plan_slots(plan, num_slots);
}

void StateCache::plan_pages(MemoryPlan& plan, const std::vector<int64_t>& num_pages) {
  std::map<int, int> of_window;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const int count = static_cast<int>(num_pages.at(i));
    groups_[i].allocate(count, num_slots_);
    of_window[groups_[i].window()] = count;
  }
  for (const auto& model : models_) model->plan_pages(plan, of_window);
}

void StateCache::clear_slots(const Context& ctx) {
  for (const auto& model : models_) model->clear_slots(ctx);
}

void StateCache::clear_pages(const Context& ctx) {
  for (const auto& model : models_) model->clear_pages(ctx);
}

int64_t StateCache::page_bytes(int group) const {
  int64_t bytes = 0;
  for (const auto& model : models_) bytes += model->page_bytes(this->group(group).window());
  return bytes;
}

int64_t StateCache::slot_bytes() const {
  int64_t bytes = 0;
  for (const auto& model : models_) bytes += model->slot_bytes();
  return bytes;
}

void StateCache::bind(const Context& ctx, const Arena& arena) {
  device_ = ctx.device;
  table_ = arena.array<int>(table_id_);
  std::map<int, const int*> tables;
  for (int i = 0; i < num_groups(); ++i) tables[group(i).window()] = table_ + i * table_size();
  for (const auto& model : models_) model->bind(arena, tables);
  const int64_t bytes = 4 * num_groups() * table_size();
  staging_ = static_cast<int*>(allocate_pinned(ctx.device, bytes));
  std::memset(staging_, 0, static_cast<size_t>(bytes));
  copy_to_device(ctx.device, table_, staging_, bytes, ctx.stream);
}

bool StateCache::reserve(const Context& ctx, int slot, int num_entries, uint64_t num_steps) {
  return grow(ctx, 0, slot, 0, num_entries, num_steps);
}

bool StateCache::reserve_windows(const Context& ctx, int slot, int length, int num_entries,
                                 uint64_t num_steps) {
  for (int group = 1; group < num_groups(); ++group) {
    if (!grow(ctx, group, slot, length, num_entries, num_steps)) return false;
  }
  return true;
}

bool StateCache::grow(const Context& ctx, int group, int slot, int length, int num_entries,
                      uint64_t num_steps) {
  CHECK_STATE(pages_for(num_entries) <= max_pages_,
              "slot {} asks for {} tokens, the page table holds {}", slot, num_entries,
              max_pages_ * kPageSize);
  PageGroup& pages = groups_[static_cast<size_t>(group)];
  const int end = pages.of_slot(slot).end();
  if (!pages.reserve(slot, length, num_entries, num_steps)) return false;
  upload(ctx, group, slot, std::max(end, pages.of_slot(slot).first));
  return true;
}

void StateCache::share(const Context& ctx, int slot, const std::vector<HeldPages>& pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    CHECK_STATE(pages[i].end() <= max_pages_,
                "slot {} would begin with {} pages, the page table holds {}", slot, pages[i].end(),
                max_pages_);
    groups_.at(i).share(slot, pages[i].first, pages[i].pages);
    upload(ctx, static_cast<int>(i), slot, pages[i].first);
  }
}

// Uploads the slot's page numbers from page `first` of the sequence on.
// NOTE: an upload in flight may read newer page numbers from the staging buffer. That is harmless:
// a page gets another owner only once no step in flight reads it.
void StateCache::upload(const Context& ctx, int group, int slot, int first) {
  const HeldPages& held = groups_[static_cast<size_t>(group)].of_slot(slot);
  const int count = held.end() - first;
  if (count <= 0) return;
  const int64_t at = group * table_size() + int64_t{slot} * max_pages_ + first;
  std::copy(held.pages.end() - count, held.pages.end(), staging_ + at);
  copy_to_device(ctx.device, table_ + at, staging_ + at, int64_t{4} * count, ctx.stream);
}

void StateCache::release(int slot, uint64_t num_steps) {
  for (PageGroup& group : groups_) group.release(slot, num_steps);
}

std::vector<int> StateCache::take(int group, int most) {
  PagePool& pool = groups_.at(static_cast<size_t>(group)).pool();
  std::vector<int> pages;
  for (int i = std::min(most, pool.num_free()); i > 0; --i) pages.push_back(pool.take());
  return pages;
}

void StateCache::hold(int group, const std::vector<int>& pages) {
  for (int page : pages) groups_.at(static_cast<size_t>(group)).pool().share(page);
}

void StateCache::drop(int group, const std::vector<int>& pages, uint64_t num_steps) {
  for (int page : pages) groups_.at(static_cast<size_t>(group)).pool().release(page, num_steps);
}

void StateCache::save_page(const Context& ctx, int group, int page, char* host) const {
  const int window = this->group(group).window();
  for (const auto& model : models_) {
    model->save_page(ctx, window, page, host);
    host += model->page_bytes(window);
  }
}

void StateCache::load_page(const Context& ctx, int group, int page, const char* host) const {
  const int window = this->group(group).window();
  for (const auto& model : models_) {
    model->load_page(ctx, window, page, host);
    host += model->page_bytes(window);
  }
}

void StateCache::save_slot(const Context& ctx, int slot, char* host) const {
  for (const auto& model : models_) {
    model->save_slot(ctx, slot, host);
    host += model->slot_bytes();
  }
}

void StateCache::load_slot(const Context& ctx, int slot, const char* host) const {
  for (const auto& model : models_) {
    model->load_slot(ctx, slot, host);
    host += model->slot_bytes();
  }
}

void StateCache::retire(uint64_t num_done) {
  for (PageGroup& group : groups_) group.pool().retire(num_done);
}

int StateCache::num_retiring() const {
  int count = 0;
  for (const PageGroup& group : groups_) count += group.pool().num_retiring();
  return count;
}

void StateCache::reset(const Context& ctx, int slot) const {
  for (const auto& model : models_) model->reset(ctx, slot);
}

}  // namespace cpmcu
