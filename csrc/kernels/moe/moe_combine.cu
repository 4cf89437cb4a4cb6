// moe_combine: hidden[t] += scale * (sum over ranks of weight * y + sigmoid(g) * shared), [T, D].
//
// Roofline: T k D 4 bytes of y, mostly from L2, where the GEMM before left them. For few tokens:
// latency.
//
// Schedule: a thread computes 8 outputs of one token; it loads 32 bytes of y for each rank. A CTA
// has 128 such threads.
//
// The surprising decision: y is float32 and is written for every pair, instead of adding pairs in
// the GEMM. Only so is the order of a token's sum fixed without atomics.
#include "kernels/moe/moe_combine.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

struct Args {
  void* hidden;
  const float* y;
  const float* weights;
  const float* shared;       // null: none
  const float* shared_gate;  // of token 0
  int64_t gate_stride;
  int top_k, width;
  float scale;
};

// ---- kernels

// Grid: (T, CTAs of a row).
template <typename T>
__global__ void __launch_bounds__(kThreads) moe_combine_kernel(const Args args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  if (column >= args.width) return;
  const float* weights = args.weights + token * args.top_k;
  const float* y = args.y + token * args.top_k * args.width + column;
  float sum[8] = {};
  const auto add = [&](const float* from, float weight) {
    const Vec16<float> low = load<float, 4>(from), high = load<float, 4>(from + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = __fmaf_rn(weight, low[i], sum[i]);
      sum[4 + i] = __fmaf_rn(weight, high[i], sum[4 + i]);
    }
  };
#pragma unroll 4
  for (int rank = 0; rank < args.top_k; ++rank) {
    add(y + static_cast<int64_t>(rank) * args.width, weights[rank]);
  }
  if (args.shared != nullptr) {
    const float gate = args.shared_gate[token * args.gate_stride];
    add(args.shared + token * args.width + column, 1 / (1 + expf(-gate)));
  }
  T* hidden = static_cast<T*>(args.hidden) + token * args.width + column;
  Vec16<T> result = load<T, 8>(hidden);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    result[i] = from_float<T>(__fmaf_rn(args.scale, sum[i], to_float(result[i])));
  }
  store(hidden, result);
}

}  // namespace

// ---- launchers

// Graph-safe.
void moe_combine(const Context& ctx, const MoeCombineParams& p) {
  check_moe_combine(p);
  check_rows("moe_combine", "hidden", p.hidden);
  CHECK(is_aligned16(p.y.data()) && is_aligned16(p.shared.data()),
        "moe_combine: y or shared is not aligned to 16 bytes");
  const int64_t num_tokens = p.hidden.size(0), width = p.hidden.size(1);
  if (num_tokens == 0) return;
  Args args{.hidden = p.hidden.data(),
            .y = p.y.as<float>(),
            .weights = p.routing.weights,
            .shared = nullptr,
            .shared_gate = nullptr,
            .gate_stride = 0,
            .top_k = p.routing.top_k,
            .width = static_cast<int>(width),
            .scale = p.scale};
  if (!p.shared.empty()) {
    args.shared = p.shared.as<float>();
    args.shared_gate = p.shared_gate.as<float>() + p.gate_column;
    args.gate_stride = p.shared_gate.size(1);
  }
  const dim3 grid(num_tokens, (width / 8 + kThreads - 1) / kThreads);
  dispatch_half(p.hidden.dtype(), [&](auto t) {
    launch(ctx, moe_combine_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
