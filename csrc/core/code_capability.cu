// The compiled architecture that the driver chose for this device.
#include "core/device.h"

namespace cpmcu {
namespace {

__global__ void probe_kernel() {}

}  // namespace

int code_capability() {
  cudaFuncAttributes attributes{};
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, probe_kernel));
  return attributes
      .ptxVersion;  // the source architecture of the code, also of code that was not PTX
}

}  // namespace cpmcu
