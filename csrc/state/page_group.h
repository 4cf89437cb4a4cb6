// The pages of one group of layers: which page holds each 64 KV entries of each slot.
//
// Layers whose attention has the same window are a group, with pages of its own. A token attends to
// the last `window` tokens. So a slot of a group with a window gives the pages before it back while
// its sequence goes on. Host only: StateCache owns the memory of the pages and their table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/step/step_tokens.h"
#include "state/page_pool.h"

namespace cpmcu {

constexpr int pages_for(int num_entries) { return (num_entries + kPageSize - 1) / kPageSize; }

// The first entry of a page is a multiple of 64: page i of a sequence has the entries from 64 i on.
struct HeldPages {
  int first = 0;             // number in the sequence of the page pages[0]
  std::vector<int> pages{};  // page numbers in the order of the sequence, without gaps

  int end() const { return first + static_cast<int>(pages.size()); }
};

class PageGroup {
 public:
  // `window`: tokens that a token attends to, itself included; 0: all.
  explicit PageGroup(int window = 0) : window_(window) {}
  void allocate(int num_pages, int num_slots);

  int window() const { return window_; }
  PagePool& pool() { return pool_; }
  const PagePool& pool() const { return pool_; }
  const HeldPages& of_slot(int slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  // The first page that a token at position `length` or later reads.
  int first_read(int length) const;
  // Maximum number of pages that `num_entries` consecutive entries and the window before them can
  // occupy.
  int most_pages(int num_entries) const;

  // Takes pages for the entries that a token at position `length` or later reads, up to
  // `num_entries`. Gives the pages before them back; `num_steps` as in PagePool. If too few pages
  // are free, takes none and returns false.
  bool reserve(int slot, int length, int num_entries, uint64_t num_steps);
  // The pages that `reserve` would lack, even after the steps in flight. 0: none.
  int num_missing(int slot, int length, int num_entries) const;
  // Adds pages that have other owners to a slot without pages, as its pages from `first` on. The
  // slot must never write to them.
  void share(int slot, int first, const std::vector<int>& pages);
  void release(int slot, uint64_t num_steps);  // gives back all pages of the slot

 private:
  int window_;
  PagePool pool_;
  std::vector<HeldPages> slots_;
};

}  // namespace cpmcu
