// gated_norm: RMSNorm of gated groups of columns, in float32, rounded once.
//
// Roofline: 6 bytes an element of HBM traffic. For one token: latency.
//
// Schedule: a CTA of 128 threads has one group of one token. It reads x and the gate for the sum of
// squares and again, from L1, for the result.
//
// Surprising: the gate comes before the norm, so each value is computed twice. A second
// exponential costs less than keeping the values of a group of any width.
#include "kernels/layer/gated_norm.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__device__ __forceinline__ void gated(float (&v)[8], const T* x, const T* gate) {
  const Vec16<T> values = load<T, 8>(x), gates = load<T, 8>(gate);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float z = to_float(gates[i]);
    v[i] = __fmul_rn(to_float(values[i]), silu(z));
  }
}

// ---- kernels

// Grid: (T, groups).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gated_norm_kernel(T* out, const T* x, const T* gate, int64_t gate_row,
                      const T* __restrict__ weight, int width, float eps) {
  __shared__ float scratch[32];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t first = int64_t{blockIdx.y} * width;
  const int64_t row = blockIdx.x * int64_t{gridDim.y} * width + first;
  const T* const gates = gate + blockIdx.x * gate_row + first;
  float v[8], sum = 0;
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    gated(v, x + row + at, gates + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  }
  sum = block_reduce<kThreads>(sum, 0.0f, scratch, Sum{});
  const float scale = rsqrtf(sum / static_cast<float>(width) + eps);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    gated(v, x + row + at, gates + at);
    const Vec16<T> w = load<T, 8>(weight + first + at);
    Vec16<T> result;
#pragma unroll
    for (int i = 0; i < 8; ++i) result[i] = from_float<T>(to_float(w[i]) * (v[i] * scale));
    store(out + row + at, result);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads x and the gate from the device.
void gated_norm(const Context& ctx, const GatedNormParams& p) {
  check_gated_norm(p);
  check_rows("gated_norm", "out", p.out);
  check_rows("gated_norm", "x", p.x);
  check_rows("gated_norm", "gate", p.gate);
  check_vector("gated_norm", "weight", p.weight, p.x.dtype(), p.x.size(1));
  if (p.x.size(0) == 0) return;
  const dim3 grid(p.x.size(0), p.num_groups);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, gated_norm_kernel<T>, grid, dim3(kThreads), 0, p.out.as<T>(), p.x.as<T>(),
           p.gate.as<T>() + p.first_gate, p.gate.size(1), p.weight.as<T>(),
           static_cast<int>(p.x.size(1) / p.num_groups), p.eps);
  });
}

}  // namespace cpmcu::cuda
