// What kernels stamped of a clock (core/trace.cuh), for the host. Only in builds with
// CPMCU_TRACE=1.
#pragma once

#ifdef CPMCU_TRACE
#include <string>
#include <vector>

namespace cpmcu {

// What a block of threads stamped in the last launches of its file's kernels.
struct TraceRing {
  static constexpr int kBlocks = 512, kLaunches = 64, kStamps = 16;
  unsigned long long count;  // of launches; the next is in place count % kLaunches
  unsigned long long nanoseconds[kLaunches][kStamps];  // 0: not passed
};

struct TracedFile {
  std::string name;
  const void* rings;  // symbol of TraceRing[kBlocks]
};

inline std::vector<TracedFile>& traced_files() {
  static std::vector<TracedFile> files;
  return files;
}

}  // namespace cpmcu
#endif
