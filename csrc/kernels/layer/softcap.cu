// softcap: x = cap * tanh(x / cap), in place, float32.
//
// Roofline: 8 bytes an element of HBM traffic. For one row of logits: latency.
//
// Schedule: one thread has one element.
//
// Surprising: tanhf, not tanh.approx, because logprobs are compared with those of other engines.
#include "kernels/layer/softcap.h"

#include "core/launch.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

// ---- kernels

__global__ void __launch_bounds__(kThreads) softcap_kernel(float* x, int64_t size, float cap) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) x[i] = cap * tanhf(__fdiv_rn(x[i], cap));
}

}  // namespace

// ---- launchers

// Graph-safe; reads x from the device.
void softcap(const Context& ctx, const SoftcapParams& p) {
  check_softcap(p);
  const int64_t size = p.x.num_elements();
  if (size == 0) return;
  const dim3 grid((size + kThreads - 1) / kThreads);
  launch(ctx, softcap_kernel, grid, dim3(kThreads), 0, p.x.as<float>(), size, p.cap);
}

}  // namespace cpmcu::cuda
