// norm_add: hidden[t] = (hidden[t] + norm(x[t])) * scale, in float32, rounded once.
//
// Roofline: 6 bytes an element of HBM traffic. For one row: latency.
//
// Schedule: one CTA of 512 threads for each row. It reads x for the sum of squares and again, from
// L1, for the result.
//
// Surprising: the CTA size does not depend on H, so one instantiation serves all models.
#include "kernels/layer/norm_add.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 512;

// ---- kernels

// Grid: T.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_add_kernel(T* hidden, const T* x, const T* __restrict__ weight,
                    const T* __restrict__ scale, int width, float eps, float weight_offset,
                    float factor) {
  __shared__ float scratch[32];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = int64_t{blockIdx.x} * width;
  float sum = 0;
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    const Vec16<T> values = load<T, 8>(x + row + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(values[i]) * to_float(values[i]);
  }
  sum = block_reduce<kThreads>(sum, 0.0f, scratch, Sum{});
  const float by = rsqrtf(sum / static_cast<float>(width) + eps);
  const float out_scale = factor * (scale == nullptr ? 1.0f : to_float(*scale));
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    const Vec16<T> values = load<T, 8>(x + row + at);
    const Vec16<T> w = load<T, 8>(weight + at);
    Vec16<T> out = load<T, 8>(hidden + row + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float normed = to_float(values[i]) * by * (to_float(w[i]) + weight_offset);
      out[i] = from_float<T>((to_float(out[i]) + normed) * out_scale);
    }
    store(hidden + row + at, out);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads hidden and x from the device.
void norm_add(const Context& ctx, const NormAddParams& p) {
  check_norm_add(p);
  check_rows("norm_add", "hidden", p.hidden);
  check_rows("norm_add", "x", p.x);
  check_vector("norm_add", "weight", p.weight, p.x.dtype(), p.x.size(1));
  if (p.x.size(0) == 0) return;
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, norm_add_kernel<T>, dim3(p.x.size(0)), dim3(kThreads), 0, p.hidden.as<T>(),
           p.x.as<T>(), p.weight.as<T>(), p.scale.as<T>(), static_cast<int>(p.x.size(1)), p.eps,
           p.weight_offset, p.factor);
  });
}

}  // namespace cpmcu::cuda
