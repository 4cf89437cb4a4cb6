// Pinned host memory in blocks of one size, taken from the system in segments.
//
// The prefix cache keeps pages and per-slot state there once the device has no room for them.
// Copies to and from a block are ordered by the stream, so a block may be written again at once.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/device.h"

namespace cpmcu {

class HostBlocks {
 public:
  HostBlocks(Device device, int64_t block_bytes, int blocks_per_segment);
  ~HostBlocks();
  HostBlocks(const HostBlocks&) = delete;
  HostBlocks& operator=(const HostBlocks&) = delete;

  // One segment more; returns the number of blocks. Any thread may call it while others use blocks.
  // Throws Error(kMemory).
  int grow();
  int num_blocks() const;
  int64_t block_bytes() const { return block_bytes_; }
  char* block(int index) const;

 private:
  Device device_;
  int64_t block_bytes_;
  int blocks_per_segment_;
  mutable std::mutex mutex_;
  std::vector<char*> segments_;
};

}  // namespace cpmcu
