// The context of kernel launches: the device, its stream, its limits, the GEMM library.
#pragma once

#include <string>

#include "core/device.h"
#include "core/tensor.h"

namespace cpmcu {

struct Context;
struct Exchange;  // core/exchange.h

// A GEMM library: y [M, N] = alpha * x [M, K] w [N, K]^T + beta * y. Rows of y are y_stride
// elements apart.
class GemmLibrary {
 public:
  virtual ~GemmLibrary() = default;
  virtual void gemm(const Context& ctx, const Tensor& y, const Tensor& x, const Tensor& w,
                    float alpha, float beta, int64_t y_stride) = 0;
};

struct Context {
  Device device;
  Stream stream = nullptr;
  int sm_count = 1;
  int64_t sm_shared_bytes = 0;  // shared memory of one SM
  int64_t l2_bytes = 0;
  double bytes_per_cycle = 0;  // peak memory bytes in one SM clock cycle; 0: not known
  int compute_capability = 0;  // 10 * major + minor: 90 for 9.0; 0 on the CPU
  // Compute capability of the code that runs: below compute_capability if the driver compiled it
  // from older PTX.
  int code_capability = 0;
  bool is_shared = false;              // kernels of other processes run at the same time (MPS)
  const Exchange* exchange = nullptr;  // connects this rank with the others; null: one rank
  // CuBLASLt; null: not found, so the engine's own GEMM serves every M.
  GemmLibrary* cublas = nullptr;
  // Counts the overlapping launches of this stream. Two consecutive ones use different launch
  // shapes (kernels/gemm/packed/kernel.cuh). Null: all use the first shape.
  uint32_t* overlapping_launches = nullptr;
};

// A context that owns its stream.
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
