// normed_gemm: y [M, N] = RMSNorm(x) W^T for the few rows of a decode step. W is small and has 16
// bits, such as the gates of a gated delta net (N = 64, K = 4096).
//
// Roofline: W is read once, 2 N K bytes: 0.5 MB, 0.2 us at 3 TB/s. So latency decides.
//
// Schedule: a CTA has one row of W and up to kRows rows of x, one after the other. (With 16 rows of
// x in a CTA, a launch took 16 us.)
//   before pdl_wait   the row of W and the norm weights -> registers, multiplied in float32
//   each row of x     a thread loads 8 elements at a time, adds x w and x^2; a warp adds its
//                     lanes
//   end               the warps' sums are added in warp order, and divided by the root mean square
// Nothing of this depends on M, so a row of y has the same bits whatever the batch.
//
// The surprising decision: no tensor cores. With tiles of 16 rows of W only 4 SMs would read 0.5
// MB, and a launch took 15 us.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/gemm.h"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4;  // rows of x that a CTA has
constexpr int kVecs = 4;  // vectors of 8 elements that a thread has: K is at most kMaxK
constexpr int kMaxK = kVecs * kThreads * 8;

struct Args {
  void* y;        // [M, N]
  const void* x;  // [M, K]
  const void* w;  // [N, K]
  const void* norm_weight;
  int m, n, k;
  float eps, offset;
};

// ---- kernel

// Grid: (N, CTAs of the rows of x).
template <typename T>
__global__ void __launch_bounds__(kThreads) normed_gemm_kernel(const Args args) {
  __shared__ float2 partial[kRows][kWarps];  // dots with W, and sums of squares
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row_of_w = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y) * kRows;
  const int num_rows = min(args.m - first, kRows);
  const T* const rows = static_cast<const T*>(args.x) + int64_t{first} * args.k;
  ptx::pdl_launch();
  float w[kVecs][8];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int k = (i * kThreads + threadIdx.x) * 8;
    if (k >= args.k) break;
    const Vec16<T> weight = load<T, 8>(static_cast<const T*>(args.w) + row_of_w * args.k + k);
    const Vec16<T> norm = load<T, 8>(static_cast<const T*>(args.norm_weight) + k);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      w[i][j] = __fmul_rn(to_float(weight[j]), __fadd_rn(to_float(norm[j]), args.offset));
    }
  }
  ptx::pdl_wait();
#pragma unroll 2
  for (int row = 0; row < num_rows; ++row) {
    float dots = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int k = (i * kThreads + threadIdx.x) * 8;
      if (k >= args.k) break;
      const Vec16<T> x = load<T, 8>(rows + row * args.k + k);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float value = to_float(x[j]);
        dots = __fmaf_rn(value, w[i][j], dots);
        squares = __fmaf_rn(value, value, squares);
      }
    }
    dots = warp_reduce(dots, Sum());
    squares = warp_reduce(squares, Sum());
    if (lane == 0) partial[row][warp] = make_float2(dots, squares);
  }
  __syncthreads();
  if (const int row = threadIdx.x; row < num_rows) {
    float dots = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      dots = __fadd_rn(dots, partial[row][i].x);
      squares = __fadd_rn(squares, partial[row][i].y);
    }
    const float mean = __fadd_rn(__fdiv_rn(squares, static_cast<float>(args.k)), args.eps);
    static_cast<T*>(args.y)[int64_t{first + row} * args.n + row_of_w] =
        from_float<T>(__fmul_rn(dots, rsqrtf(mean)));
  }
}

}  // namespace

// ---- launchers

// Graph-safe.
void normed_gemm(const Context& ctx, const NormedGemmParams& p) {
  check_normed_gemm(p);
  check_rows("normed_gemm", "x", p.x);
  check_rows("normed_gemm", "w", p.w);
  const int64_t m = p.x.size(0), n = p.w.size(0), k = p.x.size(1);
  check_vector("normed_gemm", "norm weight", p.norm_weight, p.x.dtype(), k);
  CHECK(k <= kMaxK, "normed_gemm: K is {}, expected at most {} on CUDA", k, kMaxK);
  if (m == 0) return;
  const Args args{.y = p.y.data(),
                  .x = p.x.data(),
                  .w = p.w.data(),
                  .norm_weight = p.norm_weight.data(),
                  .m = static_cast<int>(m),
                  .n = static_cast<int>(n),
                  .k = static_cast<int>(k),
                  .eps = p.norm_eps,
                  .offset = p.norm_offset};
  const dim3 grid(n, (m + kRows - 1) / kRows);
  dispatch_half(p.x.dtype(), [&](auto t) {
    launch(ctx, normed_gemm_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
