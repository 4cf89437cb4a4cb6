// moe_combine: hidden[t] += scale * (sum over ranks of weight * (y + bias) + sigmoid(g) * shared),
// [T, D]; then RMSNorm of hidden, if the next layer begins with one.
//
// Roofline: T k D 4 bytes of y, mostly from L2, where the GEMM before left them. For few tokens:
// latency.
//
// Schedule: a thread computes 8 outputs of one token; it loads 32 bytes of y for each rank, those
// of 8 ranks and of hidden at once. A CTA has 128 such threads. With a norm a CTA has a whole token
// and the threads of rms_norm's CTA.
//
// The surprising decision: y is float32 and is written for every pair, instead of adding pairs in
// the GEMM. This alone fixes the order of a token's sum without atomics.
#include "kernels/moe/moe_combine.h"

#include <type_traits>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kPartThreads = 128;     // threads of a CTA without a norm
constexpr int kMaxNormed = 1024 * 8;  // maximum D with which the norm is part of the launch

struct Args {
  void* hidden;
  const float* y;
  const float* weights;
  const void* bias;          // [E, D]; null: no bias
  const int* experts;        // expert of each pair
  const float* shared;       // null: no shared expert
  const float* shared_gate;  // gate logit of the first token; null: no gate
  int64_t gate_stride;
  int top_k, width;
  float scale;
  void* normed;             // [T, D]
  const void* norm_weight;  // [D]
  float norm_eps, norm_offset;
};

// ---- kernels

// Adds the experts' sum to 8 numbers of hidden, and returns them. `kRanks`: ranks whose results are
// requested at once.
template <typename T, int kRanks, bool kBias>
__device__ __forceinline__ Vec16<T> combined(const Args& args, int64_t token, int column) {
  const float* weights = args.weights + token * args.top_k;
  [[maybe_unused]] const int* experts = args.experts + token * args.top_k;
  const float* y = args.y + token * args.top_k * args.width + column;
  T* const hidden = static_cast<T*>(args.hidden) + token * args.width + column;
  Vec16<T> result = load<T, 8>(hidden);
  float sum[8] = {};
#pragma unroll 1
  for (int first = 0; first < args.top_k; first += kRanks) {
    Vec16<float> parts[kRanks][2];
    [[maybe_unused]] Vec16<T> bias[kRanks];
    float of_rank[kRanks];
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = first + i;
      if (rank >= args.top_k) continue;
      const float* from = y + static_cast<int64_t>(rank) * args.width;
      of_rank[i] = weights[rank];
      parts[i][0] = load<float, 4>(from), parts[i][1] = load<float, 4>(from + 4);
      if constexpr (kBias) {
        bias[i] = load<T, 8>(static_cast<const T*>(args.bias) +
                             static_cast<int64_t>(experts[rank]) * args.width + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (first + i >= args.top_k) continue;
      if constexpr (kBias) {
#pragma unroll
        for (int j = 0; j < 8; ++j) parts[i][j / 4][j % 4] += to_float(bias[i][j]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[j] = __fmaf_rn(of_rank[i], parts[i][j / 4][j % 4], sum[j]);
      }
    }
  }
  if (args.shared != nullptr) {
    const float* from = args.shared + token * args.width + column;
    const float gate = args.shared_gate[token * args.gate_stride];
    const Vec16<float> parts[2] = {load<float, 4>(from), load<float, 4>(from + 4)};
    const float weight = 1 / (1 + expf(-gate));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = __fmaf_rn(weight, parts[j / 4][j % 4], sum[j]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    result[i] = from_float<T>(__fmaf_rn(args.scale, sum[i], to_float(result[i])));
  }
  store(hidden, result);
  return result;
}

// Grid: (T, CTAs of a row); with a norm T.
template <typename T,    // __half or __nv_bfloat16
          int kThreads,  // threads of a CTA
          bool kNorms,   // a CTA has whole rows and norms them
          bool kBias>
__global__ void __launch_bounds__(kThreads) moe_combine_kernel(const __grid_constant__ Args args) {
  ptx::pdl_launch();
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  const bool valid = column < args.width;
  [[maybe_unused]] Vec16<T> norm_weight;
  if (kNorms && valid) norm_weight = load<T, 8>(static_cast<const T*>(args.norm_weight) + column);
  ptx::pdl_wait();
  Vec16<T> result;
  // With 1,024 threads, a thread has 64 registers.
  constexpr int kRanks = kThreads == 1024 ? 2 : kBias ? 4 : 8;
  if (valid) result = combined<T, kRanks, kBias>(args, token, column);
  if constexpr (kNorms) {
    __shared__ float scratch[32];
    float squares = 0;
    if (valid) {
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += to_float(result[i]) * to_float(result[i]);
    }
    squares = block_reduce<kThreads>(squares, 0.0f, scratch, Sum{});
    const float scale = rsqrtf(squares / static_cast<float>(args.width) + args.norm_eps);
    if (!valid) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      result[i] = from_float<T>(to_float(result[i]) * scale *
                                (to_float(norm_weight[i]) + args.norm_offset));
    }
    store(static_cast<T*>(args.normed) + token * args.width + column, result);
  }
}

}  // namespace

// ---- launchers

// Graph-safe.
void moe_combine(const Context& ctx, const MoeCombineParams& p) {
  check_moe_combine(p);
  check_rows("moe_combine", "hidden", p.hidden);
  CHECK(is_aligned16(p.y.data()) && is_aligned16(p.shared.data()) && is_aligned16(p.bias.data()),
        "moe_combine: y, shared or bias is not aligned to 16 bytes");
  const int64_t num_tokens = p.hidden.size(0), width = p.hidden.size(1);
  if (num_tokens == 0) return;
  Args args{.hidden = p.hidden.data(),
            .y = p.y.as<float>(),
            .weights = p.routing.weights,
            .bias = p.bias.data(),
            .experts = p.routing.experts,
            .shared = nullptr,
            .shared_gate = nullptr,
            .gate_stride = 0,
            .top_k = p.routing.top_k,
            .width = static_cast<int>(width),
            .scale = p.scale,
            .normed = p.norm.out.data(),
            .norm_weight = p.norm.weight.data(),
            .norm_eps = p.norm.eps,
            .norm_offset = p.norm.weight_offset};
  if (!p.shared.empty()) {
    args.shared = p.shared.as<float>();
    args.shared_gate = p.shared_gate.as<float>() + p.gate_column;
    args.gate_stride = p.shared_gate.size(1);
  }
  const bool has_norm = !p.norm.out.empty(), norms = has_norm && width <= kMaxNormed;
  if (norms) check_vector("moe_combine", "norm weight", p.norm.weight, p.hidden.dtype(), width);
  int threads = 64;  // the same number of threads as in rms_norm
  while (threads * 8 < width) threads *= 2;
  dispatch_half(p.hidden.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto has_bias) {
      constexpr bool kBias = decltype(has_bias)::value;
      if (!norms) {
        const dim3 grid(num_tokens, (width / 8 + kPartThreads - 1) / kPartThreads);
        launch(ctx, moe_combine_kernel<T, kPartThreads, false, kBias>, grid, dim3(kPartThreads), 0,
               args);
        return;
      }
      dispatch_int<64, 128, 256, 512, 1024>("moe_combine: CTA size", threads, [&](auto size) {
        launch(ctx, moe_combine_kernel<T, decltype(size)::value, true, kBias>, dim3(num_tokens),
               dim3(threads), 0, args);
      });
    };
    p.bias.empty() ? run(std::false_type{}) : run(std::true_type{});
  });
  if (has_norm && !norms) cuda::rms_norm(ctx, p.norm);
}

}  // namespace cpmcu::cuda
