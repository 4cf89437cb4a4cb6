// sigmoid_gate: x[t, h, i] *= sigmoid(gate[t, h, i]), in float32, rounded once.
//
// Roofline: 6 bytes an element of HBM traffic. For one row: latency.
//
// Schedule: one thread computes 8 elements from two 16-byte loads. A CTA has 128 such threads, all
// of one row.
#include "kernels/layer/sigmoid_gate.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (T, CTAs of a row). A head has `head_vectors` vectors of 8 elements. kOfHeads: a gate has
// one element.
template <typename T, bool kOfHeads>
__global__ void __launch_bounds__(kThreads)
    sigmoid_gate_kernel(T* x, const T* gates, int num_vectors, int head_vectors, int stride,
                        int64_t gates_row) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x;
  const int vector = blockIdx.y * kThreads + threadIdx.x;
  if (vector >= num_vectors) return;
  T* const at = x + (row * num_vectors + vector) * 8;
  const T* const gate_at = gates + row * gates_row + vector / head_vectors * stride;
  Vec16<T> values = load<T, 8>(at), gate;
  if constexpr (kOfHeads) {
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = *gate_at;
  } else {
    gate = load<T, 8>(gate_at + vector % head_vectors * 8);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = from_float<T>(__fdividef(to_float(values[i]), 1.0f + __expf(-to_float(gate[i]))));
  }
  store(at, values);
}

}  // namespace

// ---- launchers

// Graph-safe; reads only x and gates from the device.
void sigmoid_gate(const Context& ctx, const SigmoidGateParams& p) {
  check_sigmoid_gate(p);
  check_rows("sigmoid_gate", "x", p.x);
  if (!p.of_heads) check_rows("sigmoid_gate", "gates", p.gates);
  if (p.x.size(0) == 0) return;
  const int num_vectors = static_cast<int>(p.x.size(1) / 8);
  const dim3 grid(p.x.size(0), (num_vectors + kThreads - 1) / kThreads);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, p.of_heads ? sigmoid_gate_kernel<T, true> : sigmoid_gate_kernel<T, false>, grid,
           dim3(kThreads), 0, p.x.as<T>(), p.gates.as<T>() + p.first, num_vectors, p.head_dim / 8,
           p.stride, p.gates.size(1));
  });
}

}  // namespace cpmcu::cuda
