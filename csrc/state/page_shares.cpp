#include "state/page_shares.h"

#include <algorithm>

namespace cpmcu {

int64_t least_bytes(const std::vector<PageDemand>& groups) {
  int64_t bytes = 0;
  for (const PageDemand& group : groups) bytes += group.least * group.page_bytes;
  return bytes;
}

std::vector<int64_t> divide_pages(const std::vector<PageDemand>& groups, int64_t bytes) {
  std::vector<int64_t> shares;
  int64_t window_bytes = 0;  // sum of the bytes of one page in each group with a window
  for (size_t i = 0; i < groups.size(); ++i) {
    shares.push_back(groups[i].least);
    if (i > 0) window_bytes += groups[i].page_bytes;
  }
  int64_t rest = bytes - least_bytes(groups);
  // Gives a group pages up to `wanted`, but at most `limit` more.
  const auto give = [&](size_t i, int64_t wanted, int64_t limit) {
    const int64_t fitting = rest / std::max<int64_t>(groups[i].page_bytes, 1);
    const int64_t count = std::clamp<int64_t>(wanted - shares[i], 0, std::min(limit, fitting));
    shares[i] += count;
    rest -= count * groups[i].page_bytes;
  };
  // Gives the groups with a window equally many pages each, `most_bytes` in all.
  const auto give_windows = [&](int64_t PageDemand::* wanted, int64_t most_bytes) {
    const int64_t limit = most_bytes / std::max<int64_t>(window_bytes, 1);
    for (size_t i = 1; i < groups.size(); ++i) give(i, groups[i].*wanted, limit);
  };
  give_windows(&PageDemand::running, rest / 2);
  give(0, groups[0].sequence, rest);
  give_windows(&PageDemand::running, rest);
  give_windows(&PageDemand::most, rest / 4);
  give(0, groups[0].most, rest);
  return shares;
}

}  // namespace cpmcu
