#include "state/host_blocks.h"

#include <algorithm>

namespace cpmcu {

HostBlocks::HostBlocks(Device device, int64_t block_bytes, int blocks_per_segment, int most_blocks)
    : device_(device),
      block_bytes_(block_bytes),
      blocks_per_segment_(blocks_per_segment),
      most_blocks_(most_blocks) {
  CHECK(block_bytes >= 1 && blocks_per_segment >= 1 && most_blocks >= 1,
        "at most {} blocks of {} bytes in segments of {}", most_blocks, block_bytes,
        blocks_per_segment);
}

HostBlocks::~HostBlocks() {
  for (char* segment : segments_) release_pinned_large(device_, segment);
}

int HostBlocks::grow() {
  const int count = std::min(blocks_per_segment_, most_blocks_ - num_blocks());
  if (count == 0) return most_blocks_;
  const int64_t bytes = block_bytes_ * count;
  char* segment = static_cast<char*>(allocate_pinned_large(device_, bytes));
  const std::scoped_lock lock(mutex_);
  segments_.push_back(segment);
  num_bytes_ += bytes;
  return num_blocks_ += count;
}

int HostBlocks::num_blocks() const {
  const std::scoped_lock lock(mutex_);
  return num_blocks_;
}

int64_t HostBlocks::num_bytes() const {
  const std::scoped_lock lock(mutex_);
  return num_bytes_;
}

char* HostBlocks::block(int index) const {
  const std::scoped_lock lock(mutex_);
  CHECK(index >= 0 && index < num_blocks_, "host block {} of {}", index, num_blocks_);
  const int segment = index / blocks_per_segment_;
  return segments_[static_cast<size_t>(segment)] + block_bytes_ * (index % blocks_per_segment_);
}

}  // namespace cpmcu
