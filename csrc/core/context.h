// What every kernel launch needs: the device, its stream, its limits, the matmul library.
#pragma once

#include <string>

#include "core/device.h"

namespace cpmcu {

class CublasLt;  // kernels/gemm/cublaslt.h

struct Context {
  Device device;
  Stream stream = nullptr;
  int sm_count = 1;
  int compute_capability = 0;  // 90 for 9.0; 0 on the CPU
  int code_capability = 0;     // of our kernels' code: smaller where they run as older PTX
  CublasLt* cublas = nullptr;  // null: not found, our own GEMM serves all row counts
};

// A context of the device with a stream of its own, which whoever asks for it destroys.
inline Context open_device(Device device) {
  Context ctx;
  ctx.device = device;
  if (!device.is_cuda()) return ctx;
  const DeviceInfo info = device_info(device);
  ctx.sm_count = info.sm_count;
  ctx.compute_capability =
      std::stoi(info.compute_capability) * 10 + (info.compute_capability.back() - '0');
  set_device(device);
  ctx.code_capability = code_capability();
  ctx.stream = create_stream(device);
  return ctx;
}

}  // namespace cpmcu
