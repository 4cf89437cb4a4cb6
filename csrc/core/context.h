// What every kernel launch needs: the device, its stream, its limits, the matmul library.
#pragma once

#include <memory>

#include "core/device.h"

namespace cpmcu {

class CublasLt;  // kernels/gemm/cublaslt.h

struct Context {
  Device device;
  Stream stream = nullptr;
  int sm_count = 1;
  int compute_capability = 0;  // 90 for 9.0; 0 on the CPU
  CublasLt* cublas = nullptr;  // null: not found, our own GEMM serves all row counts
};

}  // namespace cpmcu
