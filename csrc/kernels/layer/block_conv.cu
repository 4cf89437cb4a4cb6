// block_conv: a short convolution over the rows of a draft block (kernels/layer/block_conv.h).
//
// Roofline: latency. 8 rows of 5120 elements move 0.4 MB between L2 and the SMs.
//
// Schedule: one thread computes 8 elements of a row. A CTA has 128 such threads, all of one row.
//
// Surprising: terms of rows before the block are skipped, so no row reads another sequence.
#include "kernels/layer/block_conv.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

template <typename T>
struct Conv {
  T* out;
  const T *x, *base, *delta;  // delta points to the first column of this side
  int num_columns, delta_columns, width, group, num_rows;
  bool adds;
};

// Grid: (T, CTAs of a row).
template <typename T>
__global__ void __launch_bounds__(kThreads) block_conv_kernel(const __grid_constant__ Conv<T> p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  if (column >= p.num_columns) return;
  const int num_groups = p.num_columns / p.group;
  const T* const delta = p.delta + int64_t{row} * p.delta_columns;
  float sums[8] = {};
  const int num_before = min(p.width - 1, row % p.num_rows);
  for (int t = 0; t <= num_before; ++t) {
    const auto base = load<T, 8>(p.base + int64_t{t} * p.num_columns + column);
    const auto x = load<T, 8>(p.x + int64_t{row - t} * p.num_columns + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight =
          to_float(base[i]) + to_float(delta[t * num_groups + (column + i) / p.group]);
      sums[i] += weight * to_float(x[i]);
    }
  }
  T* const out = p.out + int64_t{row} * p.num_columns + column;
  Vec16<T> y;
  if (p.adds) y = load<T, 8>(out);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = from_float<T>(sums[i] + (p.adds ? to_float(y[i]) : 0.0f));
  store(out, y);
}

}  // namespace

// ---- launchers

// Graph-safe; reads only x, base, delta and, if it adds, out from the device.
void block_conv(const Context& ctx, const BlockConvParams& p) {
  check_block_conv(p);
  check_rows("block_conv", "x", p.x);
  check_rows("block_conv", "out", p.out);
  check_rows("block_conv", "base", p.base);
  if (p.x.size(0) == 0) return;
  const int num_columns = static_cast<int>(p.x.size(1));
  const dim3 grid(p.x.size(0), (num_columns / 8 + kThreads - 1) / kThreads);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, block_conv_kernel<T>, grid, dim3(kThreads), 0,
           Conv<T>{.out = p.out.as<T>(),
                   .x = p.x.as<const T>(),
                   .base = p.base.as<const T>(),
                   .delta = p.delta.as<const T>() + p.first,
                   .num_columns = num_columns,
                   .delta_columns = static_cast<int>(p.delta.size(1)),
                   .width = static_cast<int>(p.base.size(0)),
                   .group = p.group,
                   .num_rows = p.num_rows,
                   .adds = p.adds});
  });
}

}  // namespace cpmcu::cuda
