// Runs the dense op for each expert on a copy of its rows.
#include "kernels/moe/expert_gemm.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.h"

namespace cpmcu::cpu {
namespace {

// Calls multiply(sums [m, width] float32, x [m, K], expert) for each expert with pairs, where x are
// its m rows, and rounds the sums to y.
template <typename Multiply>
void for_each_expert(const ExpertRows& rows, const Multiply& multiply) {
  const Routing& routing = rows.routing;
  const int64_t k = rows.x.size(1), width = rows.y.size(1);
  const int64_t row_bytes = k * size_of(rows.x.dtype());
  std::vector<char> x;
  std::vector<float> sums;
  for (int i = 0; i < *routing.num_active; ++i) {
    const int expert = routing.active[i];
    const int* pairs = routing.pairs + routing.offsets[expert];
    const int64_t m = routing.offsets[expert + 1] - routing.offsets[expert];
    x.resize(static_cast<size_t>(m * row_bytes));
    sums.resize(static_cast<size_t>(m * width));
    for (int64_t j = 0; j < m; ++j) {
      std::memcpy(x.data() + j * row_bytes,
                  rows.x.as<char>() + pairs[j] / rows.pairs_per_x * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
    multiply(Tensor(sums.data(), DType::kF32, {m, width}), Tensor(x.data(), rows.x.dtype(), {m, k}),
             expert);
    dispatch_host_dtype(rows.y.dtype(), [&](auto t) {
      using T = decltype(t);
      for (int64_t j = 0; j < m; ++j) {
        T* y = rows.y.as<T>() + pairs[j] * width;
        for (int64_t n = 0; n < width; ++n) y[n] = from_float<T>(sums[j * width + n]);
      }
    });
  }
}

}  // namespace

void expert_gemm(const Context& ctx, const ExpertGemmParams& p) {
  check_expert_gemm(p);
  const int64_t n = p.w.size(1), k = p.w.size(2);
  std::vector<float> both;  // gate, then up
  for_each_expert(p.rows, [&](const Tensor& sums, const Tensor& x, int expert) {
    const Tensor w = p.w.rows(expert, 1).view({n, k});
    if (!p.gated) return cpu::skinny_gemm(ctx, {.y = sums, .x = x, .w = w});
    both.resize(static_cast<size_t>(x.size(0) * n));
    cpu::skinny_gemm(ctx, {.y = Tensor(both.data(), DType::kF32, {x.size(0), n}), .x = x, .w = w});
    for (int64_t i = 0; i < sums.num_elements(); ++i) {
      const float* gate = both.data() + i / (n / 2) * n + i % (n / 2);
      sums.as<float>()[i] = *gate / (1 + std::exp(-*gate)) * gate[n / 2];
    }
  });
}

void w4_expert_gemm(const Context& ctx, const W4ExpertGemmParams& p) {
  check_w4_expert_gemm(p);
  for_each_expert(p.rows, [&](const Tensor& sums, const Tensor& x, int expert) {
    W4Weight w = p.w;
    w.blocks = static_cast<char*>(w.blocks) + expert * p.stride;
    cpu::w4_gemm(ctx, {.y = sums, .x = x, .w = w});
  });
}

}  // namespace cpmcu::cpu
