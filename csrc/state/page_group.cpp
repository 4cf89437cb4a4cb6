#include "state/page_group.h"

#include <algorithm>

#include "core/check.h"

namespace cpmcu {

void PageGroup::allocate(int num_pages, int num_slots) {
  pool_ = PagePool(num_pages);
  slots_.assign(static_cast<size_t>(num_slots), {});
}

int PageGroup::first_read(int length) const {
  return window_ == 0 ? 0 : std::max(length + 1 - window_, 0) / kPageSize;
}

int PageGroup::most_pages(int num_entries) const {
  return window_ == 0 ? pages_for(num_entries) : pages_for(window_ - 1 + num_entries) + 1;
}

bool PageGroup::reserve(int slot, int length, int num_entries, uint64_t num_steps) {
  HeldPages& held = slots_[static_cast<size_t>(slot)];
  const int first = first_read(length);
  const int num_behind = std::clamp(first - held.first, 0, static_cast<int>(held.pages.size()));
  for (int i = 0; i < num_behind; ++i) pool_.release(held.pages[i], num_steps);
  held.pages.erase(held.pages.begin(), held.pages.begin() + num_behind);
  held.first = held.pages.empty() ? first : held.first + num_behind;
  const int num_new = pages_for(num_entries) - held.end();
  if (num_new > pool_.num_free()) return false;
  for (int i = 0; i < num_new; ++i) held.pages.push_back(pool_.take());
  return true;
}

int PageGroup::num_missing(int slot, int length, int num_entries) const {
  const int end = std::max(of_slot(slot).end(), first_read(length));
  return std::max(pages_for(num_entries) - end - pool_.num_unowned(), 0);
}

void PageGroup::share(int slot, int first, const std::vector<int>& pages) {
  HeldPages& held = slots_[static_cast<size_t>(slot)];
  CHECK_STATE(held.pages.empty(), "slot {} has pages already", slot);
  for (int page : pages) pool_.share(page);
  held = {.first = first, .pages = pages};
}

void PageGroup::release(int slot, uint64_t num_steps) {
  HeldPages& held = slots_[static_cast<size_t>(slot)];
  for (auto page = held.pages.rbegin(); page != held.pages.rend(); ++page) {
    pool_.release(*page, num_steps);
  }
  held = {};
}

}  // namespace cpmcu
