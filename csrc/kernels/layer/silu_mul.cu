// silu_mul: out[t, i] = silu(gate[t, i]) * up[t, i], in float32, rounded once.
//
// Roofline: 6 bytes an output of HBM traffic; exp and division use less than half of the issue
// slots. For one row: latency.
//
// Schedule: one thread computes 8 outputs from two 16-byte loads. A CTA has 128 such threads, all
// of one row. A row is spread over I / 1024 CTAs, which keeps the latency of one row short.
#include "kernels/layer/silu_mul.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (T, CTAs of a row); num_vectors = I / 8.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(T* out, const T* x, int num_vectors, bool interleaved) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= num_vectors) return;

  const T* row_x = x + row * 2 * num_vectors * 8;
  const Vec16<T> gate = load<T, 8>(row_x + (interleaved ? 2 * column : column) * 8);
  const Vec16<T> up = load<T, 8>(row_x + (interleaved ? 2 * column + 1 : num_vectors + column) * 8);
  Vec16<T> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) result[i] = from_float<T>(silu(to_float(gate[i])) * to_float(up[i]));
  store(out + (row * num_vectors + column) * 8, result);
}

}  // namespace

// ---- launchers

// Graph-safe; reads only x from the device.
void silu_mul(const Context& ctx, const SiluMulParams& p) {
  check_rows("silu_mul", "out", p.out);
  check_rows("silu_mul", "x", p.x);
  CHECK(p.out.dtype() == p.x.dtype() && p.x.size(0) == p.out.size(0) &&
            p.x.size(1) == 2 * p.out.size(1),
        "silu_mul: x is {} {}, out is {} {}, expected twice as many columns in x",
        name_of(p.x.dtype()), p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  if (p.out.size(0) == 0) return;
  const int num_vectors = static_cast<int>(p.out.size(1) / 8);
  const dim3 grid(p.out.size(0), (num_vectors + kThreads - 1) / kThreads);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, silu_mul_kernel<T>, grid, dim3(kThreads), 0, p.out.as<T>(), p.x.as<T>(),
           num_vectors, p.interleaved);
  });
}

}  // namespace cpmcu::cuda
