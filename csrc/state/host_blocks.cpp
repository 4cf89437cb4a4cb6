#include "state/host_blocks.h"

namespace cpmcu {

HostBlocks::HostBlocks(Device device, int64_t block_bytes, int blocks_per_segment)
    : device_(device), block_bytes_(block_bytes), blocks_per_segment_(blocks_per_segment) {
  CHECK(block_bytes >= 1 && blocks_per_segment >= 1, "segments of {} blocks of {} bytes",
        blocks_per_segment, block_bytes);
}

HostBlocks::~HostBlocks() {
  for (char* segment : segments_) release_pinned_large(device_, segment);
}

int HostBlocks::grow() {
  char* segment =
      static_cast<char*>(allocate_pinned_large(device_, block_bytes_ * blocks_per_segment_));
  const std::scoped_lock lock(mutex_);
  segments_.push_back(segment);
  return static_cast<int>(segments_.size()) * blocks_per_segment_;
}

int HostBlocks::num_blocks() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<int>(segments_.size()) * blocks_per_segment_;
}

char* HostBlocks::block(int index) const {
  const std::scoped_lock lock(mutex_);
  const int segment = index / blocks_per_segment_;
  CHECK(index >= 0 && segment < static_cast<int>(segments_.size()), "host block {} of {}", index,
        segments_.size() * static_cast<size_t>(blocks_per_segment_));
  return segments_[static_cast<size_t>(segment)] + block_bytes_ * (index % blocks_per_segment_);
}

}  // namespace cpmcu
