#include "state/page_pool.h"

#include "core/check.h"

namespace cpmcu {

PagePool::PagePool(int num_pages) : owners_(static_cast<size_t>(num_pages)) {
  for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

int PagePool::num_owners(int page) const {
  CHECK_STATE(page >= 0 && page < num_pages(), "page {} of {}", page, num_pages());
  return owners_[static_cast<size_t>(page)];
}

int PagePool::take() {
  CHECK_STATE(!free_.empty(), "no page is free of {}, {} are retiring", num_pages(),
              num_retiring());
  const int page = free_.back();
  free_.pop_back();
  owners_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::share(int page) {
  CHECK_STATE(num_owners(page) > 0, "page {} is shared, but has no owner", page);
  ++owners_[static_cast<size_t>(page)];
}

void PagePool::release(int page, uint64_t num_steps) {
  CHECK_STATE(num_owners(page) > 0, "page {} is released, but has no owner", page);
  CHECK_STATE(retiring_.empty() || retiring_.back().first <= num_steps,
              "page {} is released at step {}, an earlier one at step {}", page, num_steps,
              retiring_.back().first);
  if (--owners_[static_cast<size_t>(page)] == 0) retiring_.emplace_back(num_steps, page);
}

void PagePool::retire(uint64_t num_done) {
  while (!retiring_.empty() && retiring_.front().first <= num_done) {
    free_.push_back(retiring_.front().second);
    retiring_.pop_front();
  }
}

}  // namespace cpmcu
