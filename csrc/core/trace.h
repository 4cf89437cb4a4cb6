// The timestamps of kernels (core/trace.cuh), for the host. Only in builds with CPMCU_TRACE=1.
#pragma once

#ifdef CPMCU_TRACE
#include <string>
#include <vector>

namespace cpmcu {

// The timestamps of one CTA in the last launches of its file's kernels.
struct TraceRing {
  static constexpr int kCtas = 512, kLaunches = 64, kStamps = 16;
  // Number of launches so far; the next launch writes index count % kLaunches.
  unsigned long long count;
  unsigned long long nanoseconds[kLaunches][kStamps];  // 0: the CTA did not reach the stamp
};

struct TracedFile {
  std::string name;
  const void* rings;  // device symbol of the file's TraceRing[kCtas]
};

inline std::vector<TracedFile>& traced_files() {
  static std::vector<TracedFile> files;
  return files;
}

}  // namespace cpmcu
#endif
