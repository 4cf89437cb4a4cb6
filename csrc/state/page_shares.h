// Divides the memory that is left for pages among the groups of layers.
#pragma once

#include <cstdint>
#include <vector>

namespace cpmcu {

// Numbers of pages of one group. The first group has the layers without a window.
struct PageDemand {
  int64_t page_bytes = 0;
  int64_t least = 0;     // minimum number with which the engine runs
  int64_t sequence = 0;  // pages that one sequence of max_model_len tokens needs
  int64_t running = 0;   // pages that max_num_seqs sequences need at a time
  int64_t most = 0;      // maximum number that can be used
};

int64_t least_bytes(const std::vector<PageDemand>& groups);
// The number of pages of each group. `bytes` is at least least_bytes. In this order, while memory
// lasts:
//   1. `least` of each group.
//   2. Groups with a window: the windows of all running sequences, in half of the rest at most.
//   3. Group 0: one sequence. So the longest context depends little on max_num_seqs.
//   4. Groups with a window: the windows of all running sequences that step 2 left out.
//   5. Groups with a window: a quarter of the rest. The prefix cache keeps windows there.
//   6. Group 0: `most`.
std::vector<int64_t> divide_pages(const std::vector<PageDemand>& groups, int64_t bytes);

}  // namespace cpmcu
