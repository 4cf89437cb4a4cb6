// Timestamps in kernels, to measure where a layer waits (scripts/trace_layer.py). They exist only
// in builds with CPMCU_TRACE=1; other builds have the same instructions as without them.
//
// TRACED_FILE("name"), once in a kernel file, defines the rings and the class Trace:
//   Trace trace;      // at the start of a kernel: timestamp 0
//   trace.stamp(1);   // timestamp 1
//   trace.end();      // a launch that does not reach this is not recorded
// Thread 0 of each CTA takes the timestamps, so only its own waits are visible. If two launches of
// the same file overlap (M > 64), their timestamps are not valid.
#pragma once

#include "core/trace.h"

#ifdef CPMCU_TRACE
#include "core/ptx.cuh"

#define TRACED_FILE(name)                                         \
  static __device__ TraceRing trace_rings[TraceRing::kCtas];      \
  [[maybe_unused]] static const bool kIsTraced =                  \
      (traced_files().push_back({name, &trace_rings}), true);     \
  struct Trace : CtaTrace {                                       \
    __device__ __forceinline__ Trace() : CtaTrace(trace_rings) {} \
  }

namespace cpmcu {

class CtaTrace {
 public:
  __device__ __forceinline__ explicit CtaTrace(TraceRing* rings) {
    const unsigned cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x != 0 || cta >= TraceRing::kCtas) return;
    ring_ = rings + cta;
    stamps_ = ring_->nanoseconds[ring_->count % TraceRing::kLaunches];
    for (int i = 0; i < TraceRing::kStamps; ++i) stamps_[i] = 0;
    stamp(0);
  }
  __device__ __forceinline__ void stamp(int place) {
    if (ring_ != nullptr) stamps_[place] = ptx::global_nanoseconds();
  }
  __device__ __forceinline__ void end() {
    if (ring_ != nullptr) ++ring_->count;
  }

 private:
  TraceRing* ring_ = nullptr;
  unsigned long long* stamps_ = nullptr;
};

}  // namespace cpmcu
#else
#define TRACED_FILE(name)                         \
  struct Trace {                                  \
    __device__ __forceinline__ void stamp(int) {} \
    __device__ __forceinline__ void end() {}      \
  }
#endif
