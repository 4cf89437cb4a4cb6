// rms_norm: out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * (weight + offset), in float32, rounded once.
//
// Roofline: 4 bytes an element of HBM traffic. For one row: the latency of one load, one reduction
// and one store.
//
// Schedule: one CTA for each row.
//   1. Load the weights into registers, before the row arrives (PDL).
//   2. Load the row into registers, 8 or 16 elements a thread.
//   3. Reduce the sum of squares over the CTA, scale, store.
//
// Surprising: the CTA size and the elements of a thread depend only on H. Therefore the bits of a
// row do not depend on the batch.
#include "kernels/layer/rms_norm.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kMaxThreads = 1024;
// Maximum number of vectors of 8 elements in a thread: H up to 16384.
constexpr int kMaxVectors = 2;

// ---- kernels

// Grid: T. `width` is H, at most kThreads * kVectors * 8. `out` may alias `x` if both have the same
// stride and there is no index.
template <typename T, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(T* out, const T* x, const int* index, const T* __restrict__ weight, int width,
                    int64_t out_stride, float eps, float weight_offset) {
  __shared__ float scratch[32];
  ptx::pdl_launch();
  const auto column_of = [](int vector) { return (vector * kThreads + threadIdx.x) * 8; };
  Vec16<T> w[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column_of(i) < width) w[i] = load<T, 8>(weight + column_of(i));
  }
  ptx::pdl_wait();

  const int row = blockIdx.x;
  const int64_t row_begin = int64_t{index ? index[row] : row} * width;
  const int64_t out_begin = int64_t{row} * out_stride;
  float values[kVectors][8];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column_of(i) >= width) break;
    const Vec16<T> v = load<T, 8>(x + row_begin + column_of(i));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[i][j] = to_float(v[j]);
      sum += values[i][j] * values[i][j];
    }
  }
  sum = block_reduce<kThreads>(sum, 0.0f, scratch, Sum{});
  const float scale = rsqrtf(sum / static_cast<float>(width) + eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column_of(i) >= width) break;
    Vec16<T> v;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = from_float<T>(values[i][j] * scale * (to_float(w[i][j]) + weight_offset));
    }
    store(out + out_begin + column_of(i), v);
  }
}

// The smallest CTA of at least 64 threads with one vector for each thread.
int threads_for(int num_vectors) {
  int threads = 64;
  while (threads < num_vectors && threads < kMaxThreads) threads *= 2;
  return threads;
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: index.
void rms_norm(const Context& ctx, const RmsNormParams& p) {
  check_rows("rms_norm", "x", p.x);
  check_rows("rms_norm", "out", p.out);
  CHECK(p.out.dtype() == p.x.dtype() && (p.index || p.out.size(0) == p.x.size(0)) &&
            p.out.size(1) == p.x.size(1),
        "rms_norm: x is {} {}, out is {} {}, expected the same dtype and shape",
        name_of(p.x.dtype()), p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  check_vector("rms_norm", "weight", p.weight, p.x.dtype(), p.x.size(1));
  const int width = static_cast<int>(p.x.size(1));
  CHECK(width <= kMaxThreads * kMaxVectors * 8,
        "rms_norm: rows have {} elements, expected at most {}", width,
        kMaxThreads * kMaxVectors * 8);
  check_stride("rms_norm", p.out_stride, width);
  if (p.out.size(0) == 0) return;
  const int64_t out_stride = p.out_stride ? p.out_stride : width;
  const dim3 grid(p.out.size(0));
  const int threads = threads_for(width / 8);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel) {
      launch(ctx, kernel, grid, dim3(threads), 0, p.out.as<T>(), p.x.as<T>(), p.index,
             p.weight.as<T>(), width, out_stride, p.eps, p.weight_offset);
    };
    if (width > kMaxThreads * 8) {
      run(rms_norm_kernel<T, kMaxThreads, kMaxVectors>);
      return;
    }
    dispatch_int<64, 128, 256, 512, 1024>("rms_norm: CTA size", threads, [&](auto size) {
      run(rms_norm_kernel<T, decltype(size)::value, 1>);
    });
  });
}

}  // namespace cpmcu::cuda
