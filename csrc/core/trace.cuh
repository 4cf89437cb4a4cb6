// Stamps of a clock in kernels, to see what a layer waits for (scripts/trace_layer.py). Only in
// builds with CPMCU_TRACE=1; of others it changes no instruction.
//
// TRACED_FILE("name"), once in a file of kernels, makes the rings and the class Trace:
//   Trace trace;      // at the beginning of a kernel: stamps place 0
//   trace.stamp(1);   // place 1
//   trace.end();      // a launch that does not come here leaves no trace
// The first thread of a block stamps, so only what it waits for is seen. Of launches that overlap
// others of their file (chains of more than 64 rows) nothing can be said.
#pragma once

#include "core/trace.h"

#ifdef CPMCU_TRACE
#include "core/ptx.cuh"

#define TRACED_FILE(name)                                           \
  static __device__ TraceRing trace_rings[TraceRing::kBlocks];      \
  [[maybe_unused]] static const bool kIsTraced =                    \
      (traced_files().push_back({name, &trace_rings}), true);       \
  struct Trace : BlockTrace {                                       \
    __device__ __forceinline__ Trace() : BlockTrace(trace_rings) {} \
  }

namespace cpmcu {

class BlockTrace {
 public:
  __device__ __forceinline__ explicit BlockTrace(TraceRing* rings) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x != 0 || block >= TraceRing::kBlocks) return;
    ring_ = rings + block;
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
