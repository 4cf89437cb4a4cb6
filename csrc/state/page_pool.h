// Page numbers with reference counts, on the host. StateCache owns the memory of the pages.
//
// A page has 0 or more owners. Without owners, a page is *retiring* until the last step that may
// read it is done. Then it is free.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace cpmcu {

class PagePool {
 public:
  explicit PagePool(int num_pages = 0);

  int num_pages() const { return static_cast<int>(owners_.size()); }
  int num_free() const { return static_cast<int>(free_.size()); }
  int num_retiring() const { return static_cast<int>(retiring_.size()); }
  // Pages without an owner. Steps in flight may still read those that are retiring.
  int num_unowned() const { return num_free() + num_retiring(); }
  int num_owners(int page) const;

  // Takes a free page, which then has one owner. Throws Error(kRuntime) if no page is free.
  int take();
  // Adds an owner to a page that has at least one.
  void share(int page);
  // Removes an owner of a page. `num_steps`: the number of steps launched so far, which may read
  // the page.
  void release(int page, uint64_t num_steps);
  // Frees the pages that only the first `num_done` steps may read.
  void retire(uint64_t num_done);

 private:
  std::vector<int> owners_;  // number of owners of each page
  std::vector<int> free_;    // free pages; the last one is taken next
  // Pages without owners, and the number of steps after which they are free. In order of that
  // number.
  std::deque<std::pair<uint64_t, int>> retiring_;
};

}  // namespace cpmcu
