// Runs the dense op for each expert on a copy of its rows.
#include "kernels/moe/expert_gemm.h"
#include "kernels/moe/sorted_gemm.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.h"
#include "kernels/layer/gated_activation.h"

namespace cpmcu::cpu {
namespace {

// Rows of pairs, some of them sorted by expert.
struct Rows {
  Tensor y, x;
  Routing routing;
  int pairs_per_x;
  bool sorted_x, sorted_y;
  const ExpertRows* with_bias = nullptr;  // its bias and activation are applied; null: neither

  Rows(const ExpertRows& rows)
      : y(rows.y),
        x(rows.x),
        routing(rows.routing),
        pairs_per_x(rows.pairs_per_x),
        sorted_x(false),
        sorted_y(false),
        with_bias(rows.bias.empty() ? nullptr : &rows) {}
  Rows(const SortedRows& rows)
      : y(rows.y),
        x(rows.x),
        routing(rows.routing),
        pairs_per_x(1),
        sorted_x(true),
        sorted_y(rows.sorted_y) {}
  // The rows of x and y of sorted pair i.
  int64_t x_row(int64_t i) const { return sorted_x ? i : routing.pairs[i] / pairs_per_x; }
  int64_t y_row(int64_t i) const { return sorted_y ? i : routing.pairs[i]; }
};

// Adds the bias to m rows of sums, or rounds them and computes their activation in place.
template <typename T>
void add_bias(const Context& ctx, const ExpertRows& rows, int expert, int64_t m, float* sums) {
  const int64_t n = rows.bias.size(1);
  if (rows.swiglu_limit == 0) {
    const T* bias = rows.bias.rows(expert, 1).template as<const T>();
    for (int64_t i = 0; i < m * n; ++i) sums[i] += to_float(bias[i % n]);
    return;
  }
  std::vector<T> both(static_cast<size_t>(m * n)), out(static_cast<size_t>(m * n / 2));
  for (int64_t i = 0; i < m * n; ++i) both[i] = from_float<T>(sums[i]);
  const DType dtype = rows.x.dtype();
  cpu::gated_activation(ctx, {.out = Tensor(out.data(), dtype, {m, n / 2}),
                              .x = Tensor(both.data(), dtype, {m, n}),
                              .kind = Activation::kClampedSwiglu,
                              .alpha = rows.swiglu_alpha,
                              .limit = rows.swiglu_limit,
                              .alternates = true,
                              .bias = rows.bias.rows(expert, 1)});
  for (int64_t i = 0; i < m * n / 2; ++i) sums[i] = to_float(out[i]);
}

// Calls multiply(sums [m, N] float32, x [m, K], expert) for each expert with pairs. x holds the m
// rows of the expert. Rounds the sums, or their activation, to y.
template <typename Multiply>
void for_each_expert(const Context& ctx, const Rows& rows, const Multiply& multiply) {
  const Routing& routing = rows.routing;
  const int64_t k = rows.x.size(1), width = rows.y.size(1);
  const bool halves = rows.with_bias != nullptr && rows.with_bias->swiglu_limit > 0;
  const int64_t n = halves ? 2 * width : width;
  const int64_t row_bytes = k * size_of(rows.x.dtype());
  std::vector<char> x;
  std::vector<float> sums;
  for (int i = 0; i < *routing.num_active; ++i) {
    const int expert = routing.active[i];
    const int64_t first = routing.offsets[expert], m = routing.offsets[expert + 1] - first;
    x.resize(static_cast<size_t>(m * row_bytes));
    sums.resize(static_cast<size_t>(m * n));
    for (int64_t j = 0; j < m; ++j) {
      std::memcpy(x.data() + j * row_bytes, rows.x.as<char>() + rows.x_row(first + j) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
    multiply(Tensor(sums.data(), DType::kF32, {m, n}), Tensor(x.data(), rows.x.dtype(), {m, k}),
             expert);
    dispatch_host_dtype(rows.x.dtype(), [&](auto t) {
      if (rows.with_bias == nullptr) return;
      add_bias<decltype(t)>(ctx, *rows.with_bias, expert, m, sums.data());
    });
    dispatch_host_dtype(rows.y.dtype(), [&](auto t) {
      using T = decltype(t);
      for (int64_t j = 0; j < m; ++j) {
        T* y = rows.y.as<T>() + rows.y_row(first + j) * width;
        for (int64_t i = 0; i < width; ++i) y[i] = from_float<T>(sums[j * width + i]);
      }
    });
  }
}

void dense(const Context& ctx, const Rows& rows, const Tensor& weights, bool gated) {
  const int64_t n = weights.size(1), k = weights.size(2);
  std::vector<float> both;  // results of gate, then those of up
  for_each_expert(ctx, rows, [&](const Tensor& sums, const Tensor& x, int expert) {
    const Tensor w = weights.rows(expert, 1).view({n, k});
    if (!gated) return cpu::skinny_gemm(ctx, {.y = sums, .x = x, .w = w});
    both.resize(static_cast<size_t>(x.size(0) * n));
    cpu::skinny_gemm(ctx, {.y = Tensor(both.data(), DType::kF32, {x.size(0), n}), .x = x, .w = w});
    for (int64_t i = 0; i < sums.num_elements(); ++i) {
      const float* gate = both.data() + i / (n / 2) * n + i % (n / 2);
      sums.as<float>()[i] = *gate / (1 + std::exp(-*gate)) * gate[n / 2];
    }
  });
}

void packed(const Context& ctx, const Rows& rows, PackedWeight w, int64_t stride) {
  char* const blocks = static_cast<char*>(w.blocks);
  for_each_expert(ctx, rows, [&](const Tensor& sums, const Tensor& x, int expert) {
    w.blocks = blocks + expert * stride;
    cpu::packed_gemm(ctx, {.y = sums, .x = x, .w = w});
  });
}

}  // namespace

void expert_gemm(const Context& ctx, const ExpertGemmParams& p) {
  check_expert_gemm(p);
  dense(ctx, p.rows, p.w, p.gated);
}

void packed_expert_gemm(const Context& ctx, const PackedExpertGemmParams& p) {
  check_packed_expert_gemm(p);
  packed(ctx, p.rows, p.w, p.stride);
}

void gather_pairs(const Context&, const GatherPairsParams& p) {
  check_gather_pairs(p);
  const int64_t row_bytes = p.x.size(1) * size_of(p.x.dtype());
  for (int64_t i = 0; i < p.sorted.size(0); ++i) {
    std::memcpy(p.sorted.as<char>() + i * row_bytes,
                p.x.as<char>() + p.routing.pairs[i] / p.routing.top_k * row_bytes,
                static_cast<size_t>(row_bytes));
  }
}

void sorted_gemm(const Context& ctx, const SortedGemmParams& p) {
  check_sorted_gemm(p);
  dense(ctx, p.rows, p.w, p.gated);
}

void packed_sorted_gemm(const Context& ctx, const PackedSortedGemmParams& p) {
  check_packed_sorted_gemm(p);
  packed(ctx, p.rows, p.w, p.stride);
}

}  // namespace cpmcu::cpu
