// C.trace(): the time stamps of kernels (core/trace.cuh). Only in builds with CPMCU_TRACE=1.
#include "bindings.h"
#include "core/trace.h"

#ifdef CPMCU_TRACE
#include <cuda_runtime.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>

#include "core/check.h"
#endif

namespace cpmcu {

#ifdef CPMCU_TRACE
namespace {

std::map<std::string, pybind11::array> trace() {
  using Stamp = unsigned long long;
  constexpr int kWidth = sizeof(TraceRing) / sizeof(Stamp);
  std::map<std::string, pybind11::array> rings;
  cudaError_t error = cudaDeviceSynchronize();
  for (const TracedFile& file : traced_files()) {
    pybind11::array_t<Stamp> all({static_cast<int>(TraceRing::kCtas), kWidth});
    if (error == cudaSuccess) {
      error = cudaMemcpyFromSymbol(all.mutable_data(), file.rings, all.nbytes());
    }
    CHECK(error == cudaSuccess, "trace: {}", cudaGetErrorString(error));
    rings[file.name] = all;
  }
  return rings;
}

}  // namespace
#endif

void bind_trace([[maybe_unused]] pybind11::module_& m) {
#ifdef CPMCU_TRACE
  m.def(
      "trace", &trace,
      "Time stamps by file: uint64 [CTAs, 1 + launches * 16]. Element 0 is the number of launches. "
      "The stamps of launch c, in nanoseconds, are at place c % 64 of the last 64 launches.");
#endif
}

}  // namespace cpmcu
