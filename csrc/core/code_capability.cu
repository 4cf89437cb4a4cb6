// Which of the compiled architectures the driver chose for this device.
#include "core/device.h"

namespace cpmcu {
namespace {

__global__ void probe_kernel() {}

}  // namespace

int code_capability() {
  cudaFuncAttributes attributes{};
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, probe_kernel));
  return attributes.ptxVersion;  // of the code it comes from, also where that is not PTX
}

}  // namespace cpmcu
