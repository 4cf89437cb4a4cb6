#include "state/state_cache.h"

#include <algorithm>
#include <cstring>

namespace cpmcu {

StateCache::~StateCache() {
  if (staging_ != nullptr) release_pinned(device_, staging_);
}

ModelState& StateCache::add_model(const std::string& scope, bool has_gaps) {
  models_.push_back(std::make_unique<ModelState>(scope, has_gaps));
  return *models_.back();
}

void StateCache::plan_slots(MemoryPlan& plan, int num_slots, int max_entries) {
  num_slots_ = num_slots;
  max_pages_ = (max_entries + kPageSize - 1) / kPageSize;
  table_id_ = plan.add("page_table", "state", int64_t{4} * num_slots_ * max_pages_);
  for (const auto& model : models_) model->plan_slots(plan, num_slots);
}

void StateCache::plan_pages(MemoryPlan& plan, int num_pages) {
  pool_ = PagePool(num_pages);
  for (const auto& model : models_) model->plan_pages(plan, num_pages);
}

int64_t StateCache::page_bytes() const {
  int64_t bytes = 0;
  for (const auto& model : models_) bytes += model->page_bytes();
  return bytes;
}

int64_t StateCache::slot_bytes() const {
  int64_t bytes = 0;
  for (const auto& model : models_) bytes += model->slot_bytes();
  return bytes;
}

void StateCache::bind(const Context& ctx, const Arena& arena) {
  device_ = ctx.device;
  for (const auto& model : models_) model->bind(ctx, arena);
  table_ = arena.array<int>(table_id_);
  const int64_t bytes = int64_t{4} * num_slots_ * max_pages_;
  staging_ = static_cast<int*>(allocate_pinned(ctx.device, bytes));
  std::memset(staging_, 0, static_cast<size_t>(bytes));
  copy_to_device(ctx.device, table_, staging_, bytes, ctx.stream);
  pages_.resize(static_cast<size_t>(num_slots_));
}

bool StateCache::reserve(const Context& ctx, int slot, int num_entries) {
  const int have = static_cast<int>(pages_of(slot).size());
  const int need = (num_entries + kPageSize - 1) / kPageSize;
  CHECK_STATE(need <= max_pages_, "slot {} asks for {} tokens, the page table holds {}", slot,
              num_entries, max_pages_ * kPageSize);
  if (need <= have) return true;
  if (need - have > pool_.num_free()) return false;
  std::vector<int> pages;
  for (int i = have; i < need; ++i) pages.push_back(pool_.take());
  append(ctx, slot, pages);
  return true;
}

void StateCache::share(const Context& ctx, int slot, const std::vector<int>& pages) {
  CHECK_STATE(pages_of(slot).empty(), "slot {} has pages already", slot);
  CHECK_STATE(static_cast<int>(pages.size()) <= max_pages_,
              "slot {} would begin with {} pages, the page table holds {}", slot, pages.size(),
              max_pages_);
  for (int page : pages) pool_.share(page);
  append(ctx, slot, pages);
}

// NOTE: an upload in flight may read newer page numbers from the staging buffer. That is harmless:
// a page gets another owner only once no step in flight reads it.
void StateCache::append(const Context& ctx, int slot, const std::vector<int>& pages) {
  std::vector<int>& held = pages_[static_cast<size_t>(slot)];
  const int64_t at = int64_t{slot} * max_pages_ + static_cast<int64_t>(held.size());
  std::copy(pages.begin(), pages.end(), staging_ + at);
  held.insert(held.end(), pages.begin(), pages.end());
  copy_to_device(ctx.device, table_ + at, staging_ + at, static_cast<int64_t>(4 * pages.size()),
                 ctx.stream);
}

void StateCache::release(int slot, uint64_t num_steps) {
  std::vector<int>& pages = pages_[static_cast<size_t>(slot)];
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) pool_.release(*page, num_steps);
  pages.clear();
}

std::vector<int> StateCache::take(int most) {
  std::vector<int> pages;
  for (int i = std::min(most, pool_.num_free()); i > 0; --i) pages.push_back(pool_.take());
  return pages;
}

void StateCache::hold(const std::vector<int>& pages) {
  for (int page : pages) pool_.share(page);
}

void StateCache::drop(const std::vector<int>& pages, uint64_t num_steps) {
  for (int page : pages) pool_.release(page, num_steps);
}

void StateCache::save_page(const Context& ctx, int page, char* host) const {
  for (const auto& model : models_) {
    model->save_page(ctx, page, host);
    host += model->page_bytes();
  }
}

void StateCache::load_page(const Context& ctx, int page, const char* host) const {
  for (const auto& model : models_) {
    model->load_page(ctx, page, host);
    host += model->page_bytes();
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

void StateCache::reset(const Context& ctx, int slot) const {
  for (const auto& model : models_) model->reset(ctx, slot);
}

}  // namespace cpmcu
