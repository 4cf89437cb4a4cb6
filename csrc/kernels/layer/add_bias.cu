// add_bias: y[r] += bias[index[r]], in float32, rounded once.
//
// Roofline: 4 bytes an element of HBM traffic (8 if y is float32). For one row: latency.
//
// Schedule: one thread has 8 columns of a row. A CTA has 128 such threads, all of one row.
//
// Surprising: the op is a launch of its own and not an epilogue of the GEMM. So the kernels of
// models without biases stay as they are.
#include "kernels/layer/add_bias.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (R, CTAs of a row).
template <typename Y, typename T>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(Y* y, const T* __restrict__ bias, const int* index, int64_t width) {
  ptx::pdl_launch();
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * 8;
  ptx::pdl_wait();
  if (column >= width) return;
  const int64_t from = index == nullptr ? 0 : index[blockIdx.x];
  const Vec16<T> added = load<T, 8>(bias + from * width + column);
  Y* const at = y + blockIdx.x * width + column;
  Vec<Y, 4> parts[2] = {load<Y, 4>(at), load<Y, 4>(at + 4)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    parts[i / 4][i % 4] = from_float<Y>(to_float(parts[i / 4][i % 4]) + to_float(added[i]));
  }
  store(at, parts[0]);
  store(at + 4, parts[1]);
}

}  // namespace

// ---- launchers

// Graph-safe; reads y and index from the device.
void add_bias(const Context& ctx, const AddBiasParams& p) {
  check_add_bias(p);
  CHECK(p.y.size(1) % 8 == 0, "add_bias: y is {}, expected a multiple of 8 columns",
        p.y.shape_text());
  CHECK(is_aligned16(p.y.data()) && is_aligned16(p.bias.data()),
        "add_bias: y or bias is not aligned to 16 bytes");
  if (p.y.size(0) == 0) return;
  const int64_t width = p.y.size(1);
  const dim3 grid(p.y.size(0), (width / 8 + kThreads - 1) / kThreads);
  dispatch_half(p.bias.dtype(), [&](auto t) {
    using T = decltype(t);
    if (p.y.dtype() == DType::kF32) {
      launch(ctx, add_bias_kernel<float, T>, grid, dim3(kThreads), 0, p.y.as<float>(),
             p.bias.as<T>(), p.index, width);
    } else {
      launch(ctx, add_bias_kernel<T, T>, grid, dim3(kThreads), 0, p.y.as<T>(), p.bias.as<T>(),
             p.index, width);
    }
  });
}

}  // namespace cpmcu::cuda
