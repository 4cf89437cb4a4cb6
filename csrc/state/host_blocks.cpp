#include "state/host_blocks.h"

namespace cpmcu {

HostBlocks::HostBlocks(Device device, int64_t block_bytes, int blocks_per_slab)
    : device_(device), block_bytes_(block_bytes), blocks_per_slab_(blocks_per_slab) {
  CHECK(block_bytes >= 1 && blocks_per_slab >= 1, "slabs of {} blocks of {} bytes", blocks_per_slab,
        block_bytes);
}

HostBlocks::~HostBlocks() {
  for (char* slab : slabs_) release_pinned(device_, slab);
}

int HostBlocks::grow() {
  char* slab = static_cast<char*>(allocate_pinned(device_, block_bytes_ * blocks_per_slab_));
  const std::scoped_lock lock(mutex_);
  slabs_.push_back(slab);
  return static_cast<int>(slabs_.size()) * blocks_per_slab_;
}

int HostBlocks::num_blocks() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<int>(slabs_.size()) * blocks_per_slab_;
}

char* HostBlocks::block(int index) const {
  const std::scoped_lock lock(mutex_);
  const int slab = index / blocks_per_slab_;
  CHECK(index >= 0 && slab < static_cast<int>(slabs_.size()), "host block {} of {}", index,
        slabs_.size() * static_cast<size_t>(blocks_per_slab_));
  return slabs_[static_cast<size_t>(slab)] + block_bytes_ * (index % blocks_per_slab_);
}

}  // namespace cpmcu
