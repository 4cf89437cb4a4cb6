// Pinned host memory in blocks of one size, taken from the system in segments.
//
// The prefix cache moves pages and per-slot tensors there if device memory is short. The stream
// orders the copies to and from a block, so a block may be reused at once.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/device.h"

namespace cpmcu {

class HostBlocks {
 public:
  // At most `most_blocks` are taken: the last segment may be smaller than the others.
  HostBlocks(Device device, int64_t block_bytes, int blocks_per_segment, int most_blocks);
  ~HostBlocks();
  HostBlocks(const HostBlocks&) = delete;
  HostBlocks& operator=(const HostBlocks&) = delete;

  // Allocates another segment, unless there are `most_blocks`. Returns the number of blocks. One
  // thread at a time may call it, while others use blocks. Throws Error(kMemory).
  int grow();
  int num_blocks() const;
  int64_t num_bytes() const;  // bytes taken from the system so far
  int64_t block_bytes() const { return block_bytes_; }
  char* block(int index) const;

 private:
  Device device_;
  int64_t block_bytes_;
  int blocks_per_segment_, most_blocks_;
  int num_blocks_ = 0;
  int64_t num_bytes_ = 0;
  mutable std::mutex mutex_;
  std::vector<char*> segments_;
};

}  // namespace cpmcu
