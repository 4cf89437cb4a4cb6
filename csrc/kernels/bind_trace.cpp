// C.trace(): what kernels stamped (core/trace.cuh). Only in builds with CPMCU_TRACE=1.
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
  m.def("trace", &trace,
        "Stamps by file: uint64 [CTAs, 1 + launches * 16], a count of launches and the "
        "nanoseconds of the last 64 of them, that of count c in place c % 64.");
#endif
}

}  // namespace cpmcu
