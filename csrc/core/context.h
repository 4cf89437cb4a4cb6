// The context of kernel launches: the device, its stream, its limits, the matmul library.
#pragma once

#include <string>

#include "core/device.h"
#include "core/tensor.h"

namespace cpmcu {

struct Context;

// A library of GEMMs: y [M, N] = alpha * x [M, K] w [N, K]^T + beta * y. Rows of y are y_stride
// elements apart.
class GemmLibrary {
 public:
  virtual ~GemmLibrary() = default;
  virtual void gemm(const Context& ctx, const Tensor& y, const Tensor& x, const Tensor& w,
                    float alpha, float beta, int64_t y_stride) = 0;
};

// Launches that wait to be fused with those that follow. `launch` flushes them before any other.
class PendingLaunches {
 public:
  virtual ~PendingLaunches() = default;
  virtual void flush() = 0;
};

struct Context {
  Device device;
  Stream stream = nullptr;
  int sm_count = 1;
  int64_t sm_shared_bytes = 0;  // of a multiprocessor
  int64_t l2_bytes = 0;
  double bytes_per_cycle = 0;          // as in DeviceInfo
  int compute_capability = 0;          // 90 for 9.0; 0 on the CPU
  int code_capability = 0;             // of our kernels' code: smaller where they run as older PTX
  bool is_shared = false;              // kernels of other processes run at the same time
  GemmLibrary* cublas = nullptr;       // null: not found, our own GEMM serves all row counts
  PendingLaunches* pending = nullptr;  // null: no launch waits
  // Counts the launches of this stream whose successors overlap them. Two such launches that follow
  // one another have different shapes (kernels/gemm/w4a16_kernel.cuh); null: all have the first.
  uint32_t* overlapping_launches = nullptr;
};

// A context of the device with a stream of its own.
struct DeviceContext : Context {
  explicit DeviceContext(Device on) {
    device = on;
    if (!on.is_cuda()) return;
    overlapping_launches = &num_overlapping_launches_;
    const DeviceInfo info = device_info(on);
    sm_count = info.sm_count;
    sm_shared_bytes = info.sm_shared_bytes;
    l2_bytes = info.l2_bytes;
    bytes_per_cycle = info.bytes_per_cycle;
    is_shared = info.is_shared;
    compute_capability =
        std::stoi(info.compute_capability) * 10 + (info.compute_capability.back() - '0');
    set_device(on);
    code_capability = cpmcu::code_capability();
    stream = create_stream(on);
  }
  ~DeviceContext() { destroy_stream(device, stream); }
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

 private:
  uint32_t num_overlapping_launches_ = 0;
};

}  // namespace cpmcu
