// Numbers of pages, with reference counts. Host only: the memory is StateCache's.
//
// A page has 0 or more owners. Once the last owner is gone, the page stays out of use until the
// last step that may read it is done: such a page is retiring.
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
  int num_owners(int page) const;

  // A page with one owner. Throws Error(kRuntime) if none is free.
  int take();
  // One more owner of a page that has one already.
  void share(int page);
  // One owner less. `num_steps`: the steps that were launched until now; they may read the page.
  void release(int page, uint64_t num_steps);
  // `num_done` steps are done: pages that retired before them are free.
  void retire(uint64_t num_done);

 private:
  std::vector<int> owners_;                        // of each page
  std::vector<int> free_;                          // the next to be taken last
  std::deque<std::pair<uint64_t, int>> retiring_;  // steps to be done, page; in order of steps
};

}  // namespace cpmcu
