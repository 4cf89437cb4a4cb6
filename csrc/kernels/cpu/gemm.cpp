// Reads tiles of 16 rows of w once and multiplies each with up to 64 rows of x while it is in
// cache.
#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/threads.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/layer/silu_mul.h"

namespace cpmcu::cpu {
namespace {

constexpr int64_t kTileRows = 64;     // rows of x in a tile
constexpr int64_t kTileColumns = 16;  // columns of y in a tile, which are rows of w

template <typename T, typename Y>
void multiply(const GemmParams& p) {
  const int64_t m = p.x.size(0), k = p.x.size(1), n = p.w.size(0);
  const int64_t y_stride = p.y_stride ? p.y_stride : n;
  thread_local std::vector<float> buffer;
  const float* x = dot_operand(p.x.as<T>(), m, k, buffer);
  const T* w = p.w.as<T>();
  Y* y = p.y.as<Y>();
  // Up to 4 rows of x take as long as one: the time is that of reading w.
#pragma omp parallel for collapse(2) if (threads_pay((m + 3) / 4 * n * k))
  for (int64_t row_begin = 0; row_begin < m; row_begin += kTileRows) {
    for (int64_t begin = 0; begin < n; begin += kTileColumns) {
      const int64_t count = std::min(kTileColumns, n - begin);
      const int64_t num_rows = std::min(kTileRows, m - row_begin);
      float sums[kTileRows][kTileColumns];
      dot_rows(x + row_begin * k, num_rows, w + begin * k, count, k, sums[0], kTileColumns);
      for (int64_t row = 0; row < num_rows; ++row) {
        Y* out = y + (row_begin + row) * y_stride + begin;
        for (int64_t i = 0; i < count; ++i) {
          const float value = p.alpha * sums[row][i];
          out[i] = from_float<Y>(p.beta == 0 ? value : value + p.beta * to_float(out[i]));
        }
      }
    }
  }
}

void gemm(const GemmParams& p) {
  check_gemm(p);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    p.y.dtype() == DType::kF32 ? multiply<T, float>(p) : multiply<T, T>(p);
  });
}

}  // namespace

void skinny_gemm(const Context&, const GemmParams& params) { gemm(params); }

void large_gemm(const Context&, const GemmParams& params) { gemm(params); }

void normed_gemm(const Context& ctx, const NormedGemmParams& p) {
  check_normed_gemm(p);
  std::vector<char> buffer(p.x.num_elements() * size_of(p.x.dtype()));
  const Tensor normed(buffer.data(), p.x.dtype(), {p.x.size(0), p.x.size(1)});
  cpu::rms_norm(ctx, {.out = normed,
                      .x = p.x,
                      .weight = p.norm_weight,
                      .eps = p.norm_eps,
                      .weight_offset = p.norm_offset});
  gemm({.y = p.y, .x = normed, .w = p.w});
}

void gated_gemm(const Context& ctx, const GatedGemmParams& p) {
  check_gated_gemm(p);
  gemm({.y = p.scratch, .x = p.x, .w = p.w});
  cpu::silu_mul(ctx, {.out = p.out, .x = p.scratch});
}

}  // namespace cpmcu::cpu
