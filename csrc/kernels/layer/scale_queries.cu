// scale_queries: q[t, h] *= 1 + beta * ln(1 + floor(positions[t] / length)), rounded once.
//
// Roofline: 4 bytes an element of q of HBM traffic. Below `length`: one load of a position.
//
// Schedule: one thread scales 8 elements. A CTA has 128 such threads, all of one token.
//
// Surprising: a token below `length` reads and writes nothing, so its bits are those without the
// op.
#include "kernels/layer/scale_queries.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (T, CTAs of a token). A head has `head_vectors` vectors of 8 elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_queries_kernel(T* qkv, int num_vectors, int head_vectors, QkvLayout layout, float beta,
                         int length, const int* positions) {
  ptx::pdl_launch();
  const int64_t row = blockIdx.x;
  const int vector = blockIdx.y * kThreads + threadIdx.x;
  const int times = positions[row] / length;
  ptx::pdl_wait();
  if (times == 0 || vector >= num_vectors) return;
  const float scale = 1 + beta * logf(1 + static_cast<float>(times));
  T* const at =
      qkv + row * layout.row + vector / head_vectors * layout.q_head + vector % head_vectors * 8;
  Vec16<T> values = load<T, 8>(at);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = from_float<T>(to_float(values[i]) * scale);
  store(at, values);
}

}  // namespace

// ---- launchers

// Graph-safe; reads qkv and positions from the device.
void scale_queries(const Context& ctx, const ScaleQueriesParams& p) {
  const QkvLayout layout = check_scale_queries(p);
  check_rows("scale_queries", "qkv", p.qkv);
  if (p.qkv.size(0) == 0) return;
  const int num_vectors = p.num_heads * p.head_dim / 8;
  const dim3 grid(p.qkv.size(0), (num_vectors + kThreads - 1) / kThreads);
  dispatch_half(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, scale_queries_kernel<T>, grid, dim3(kThreads), 0, p.qkv.as<T>(), num_vectors,
           p.head_dim / 8, layout, p.beta, p.length, p.positions);
  });
}

}  // namespace cpmcu::cuda
