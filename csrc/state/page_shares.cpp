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
  for (const PageDemand& group : groups) shares.push_back(group.least);
  int64_t rest = bytes - least_bytes(groups);
  // Gives a group pages up to `wanted`, of at most `limit` bytes.
  const auto give = [&](size_t i, int64_t wanted, int64_t limit) {
    const int64_t fitting = std::min(limit, rest) / std::max<int64_t>(groups[i].page_bytes, 1);
    const int64_t count = std::clamp<int64_t>(wanted - shares[i], 0, fitting);
    shares[i] += count;
    rest -= count * groups[i].page_bytes;
  };
  give(0, groups[0].sequence, rest);
  for (size_t i = 1; i < groups.size(); ++i) give(i, groups[i].running, rest);
  const int64_t cached = rest / 4;
  int64_t window_bytes = 0;
  for (size_t i = 1; i < groups.size(); ++i) window_bytes += groups[i].page_bytes;
  for (size_t i = 1; i < groups.size(); ++i) {
    const int64_t pages = cached / window_bytes;  // equally many of each group
    give(i, groups[i].most, pages * groups[i].page_bytes);
  }
  give(0, groups[0].most, rest);
  return shares;
}

}  // namespace cpmcu
