// norm_heads: RMSNorm in place of groups of columns, in float32, rounded once.
//
// Roofline: 4 bytes an element of HBM traffic. For one token: latency.
//
// Schedule: a CTA of 128 threads has one group of one token. It reads the group for the sum of
// squares and again, from L1, for the result.
//
// Surprising: the CTA size is the same for all widths, so the order of the sum depends on the width
// only.
#include "kernels/layer/norm_heads.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (T, groups).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_heads_kernel(T* x, int64_t row_width, int first, int width, const T* __restrict__ weight,
                      float eps, float weight_offset) {
  __shared__ float scratch[32];
  ptx::pdl_launch();
  ptx::pdl_wait();
  T* const group = x + blockIdx.x * row_width + first + int64_t{blockIdx.y} * width;
  float sum = 0;
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    const Vec16<T> values = load<T, 8>(group + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(values[i]) * to_float(values[i]);
  }
  sum = block_reduce<kThreads>(sum, 0.0f, scratch, Sum{});
  const float scale = rsqrtf(sum / static_cast<float>(width) + eps);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < width; at += kThreads * 8) {
    Vec16<T> values = load<T, 8>(group + at);
    Vec16<T> w{};
    if (weight != nullptr) w = load<T, 8>(weight + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = weight == nullptr ? 1.0f : to_float(w[i]) + weight_offset;
      values[i] = from_float<T>(to_float(values[i]) * scale * factor);
    }
    store(group + at, values);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads x from the device.
void norm_heads(const Context& ctx, const NormHeadsParams& p) {
  check_norm_heads(p);
  check_rows("norm_heads", "x", p.x);
  if (!p.weight.empty()) check_vector("norm_heads", "weight", p.weight, p.x.dtype(), p.width);
  if (p.x.size(0) == 0) return;
  const dim3 grid(p.x.size(0), p.num_groups);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, norm_heads_kernel<T>, grid, dim3(kThreads), 0, p.x.as<T>(), p.x.size(1), p.first,
           p.width, p.weight.as<T>(), p.eps, p.weight_offset);
  });
}

}  // namespace cpmcu::cuda
