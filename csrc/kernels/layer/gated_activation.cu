// gated_activation: activation(gate + bias, up + bias), in float32, rounded once.
//
// Roofline: 6 bytes an element of `out` of HBM traffic. For one row: latency.
//
// Schedule: one thread computes 8 elements from two 16-byte loads. A CTA has 128 such threads, all
// of one row.
//
// Surprising: models whose activation is SiLU without a bias do not use this op. Their GEMMs of
// gate and up compute the activation.
#include "kernels/layer/gated_activation.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/clamped_swiglu.cuh"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

template <Activation kKind>
__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
  if constexpr (kKind == Activation::kGeluTanh) {
    const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return gate * 0.5f * (1.0f + tanhf(inner)) * up;
  } else if constexpr (kKind == Activation::kClampedSwiglu) {
    return clamped_swiglu(gate, up, alpha, limit);
  } else if constexpr (kKind == Activation::kRelu2) {
    const float u = fmaxf(up, 0.0f);
    return u * u;
  } else {
    return silu(gate) * up;
  }
}

// Two vectors of 8 gates and 8 ups, as float32.
struct Pairs {
  float gate[8], up[8];

  template <typename T>
  __device__ __forceinline__ Pairs(const T* row, int at, int width, bool alternates)
      : Pairs(row + (alternates ? 2 * at : at), row + (alternates ? 2 * at + 8 : width + at),
              alternates) {}
  template <typename T>
  __device__ __forceinline__ Pairs(const T* first, const T* second, bool alternates) {
    const Vec16<T> a = load<T, 8>(first), b = load<T, 8>(second);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (alternates) {
        gate[i] = to_float(i < 4 ? a[i % 4 * 2] : b[i % 4 * 2]);
        up[i] = to_float(i < 4 ? a[i % 4 * 2 + 1] : b[i % 4 * 2 + 1]);
      } else {
        gate[i] = to_float(a[i]), up[i] = to_float(b[i]);
      }
    }
  }
};

// ---- kernels

// Grid: (R, CTAs of a row).
template <typename T, Activation kKind>
__global__ void __launch_bounds__(kThreads)
    gated_activation_kernel(T* out, const T* x, int width, float alpha, float limit,
                            bool alternates, const T* __restrict__ bias, const int* index,
                            const int* order, const T* up, int64_t up_stride) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x;
  const int at = (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * 8;
  if (at >= width) return;
  // A squared ReLU reads x as `up`, and has no gate.
  const bool two = up == nullptr && kKind != Activation::kRelu2;
  const T* const second = up == nullptr ? x + row * width + at : up + row * up_stride + at;
  Pairs pairs = two ? Pairs(x + row * 2 * width, at, width, alternates)
                    : Pairs(x + row * width + at, second, false);
  if (bias != nullptr) {
    const int64_t place = order == nullptr ? row : order[row];
    const int64_t from = index == nullptr ? 0 : index[place];
    const Pairs added(bias + from * 2 * width, at, width, alternates);
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs.gate[i] += added.gate[i], pairs.up[i] += added.up[i];
  }
  Vec16<T> result;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    result[i] = from_float<T>(activate<kKind>(pairs.gate[i], pairs.up[i], alpha, limit));
  }
  store(out + row * width + at, result);
}

}  // namespace

// ---- launchers

// Graph-safe; reads x, index and order from the device.
void gated_activation(const Context& ctx, const GatedActivationParams& p) {
  check_gated_activation(p);
  check_rows("gated_activation", "x", p.x);
  check_rows("gated_activation", "out", p.out);
  CHECK(is_aligned16(p.up.data()), "gated_activation: up is not aligned to 16 bytes");
  CHECK(is_aligned16(p.bias.data()), "gated_activation: the bias is not aligned to 16 bytes");
  if (p.out.size(0) == 0) return;
  const int width = static_cast<int>(p.out.size(1));
  const dim3 grid(p.out.size(0), (width / 8 + kThreads - 1) / kThreads);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel) {
      launch(ctx, kernel, grid, dim3(kThreads), 0, p.out.as<T>(), p.x.as<T>(), width, p.alpha,
             p.limit, p.alternates, p.bias.as<T>(), p.index, p.order,
             p.up.empty() ? nullptr : p.up.as<T>() + p.first_up, p.up.empty() ? 0 : p.up.size(1));
    };
    switch (p.kind) {
      case Activation::kSilu:
        return run(gated_activation_kernel<T, Activation::kSilu>);
      case Activation::kGeluTanh:
        return run(gated_activation_kernel<T, Activation::kGeluTanh>);
      case Activation::kClampedSwiglu:
        return run(gated_activation_kernel<T, Activation::kClampedSwiglu>);
      case Activation::kRelu2:
        return run(gated_activation_kernel<T, Activation::kRelu2>);
    }
  });
}

}  // namespace cpmcu::cuda
