// A run of products in which each reads what the one before wrote, as one kernel: of a layer, o,
// gate and up, down, and qkv of the next.
//
// Link i: y = alpha * x W^T + beta * y as in w4_gemm or skinny_gemm. With a norm, `normed` then
// stands for the rows of y, RMS-normed: the next gemm multiplies it, and what the memory holds
// afterwards is not said. W has 4 bits in all gemms (one digit) or 16 in all; y has x's dtype.
// The first x may be the `out` of attention_splits, which is then combined first. The last y may be
// the qkv of rotary_kv, which then follows with the same bits; of this y only what rotary_kv writes
// is said.
//
// The blocks of the kernel wait for one another, so all of them must find room: only one such
// launch may run on a device at a time (engine/graph_runner.h sees to it within a process), and the
// kernel does not run on a device that processes share by MPS.
//
// Where the kernel does not run (the CPU, before and after Hopper), gemms are launched one by one.
#pragma once

#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/gemm/w4a16.h"
#include "kernels/layer/rotary_kv.h"

namespace cpmcu {

constexpr int kMaxFusedGemms = 4;
constexpr int kFusedStateBytes = 192 * 1024;  // of a chain's memory; the rest is for sums
constexpr int kMaxFusedCtas = 144;  // of threads: the multiprocessors of the largest Hopper chip
// Up to so many groups of 8 rows sums of slices tell themselves that they have come; of more rows
// they are counted, and have another place.
constexpr int kMaxToldGroups = 2;
// Of sums of slices, of 8 rows.
constexpr int64_t kFusedSumBytes = int64_t{kMaxFusedCtas} * kW4BlockRows * 8 * 4;

struct FusedGemm {
  Tensor y;            // [M, N] (gated: [M, N / 2])
  Tensor x;            // [M, K]
  W4Weight w4{};       // W in 4 bits,
  Tensor w{};          // or [N, K] of x's dtype,
  bool gated = false;  // of which the first N / 2 rows are gate's and the others up's
  float alpha = 1;     // as in GemmParams; a gated W has none, and no beta
  float beta = 0;
  Tensor scratch{};      // where the kernel does not run: of w4_gemm; of a gated 16-bit W [M, N]
  Tensor normed{};       // [M, N]; empty: no norm
  Tensor norm_weight{};  // [N]
  float norm_eps = 0;

  bool is_dense() const { return !w.empty(); }
  bool is_gated() const { return is_dense() ? gated : w4.gated; }
  int64_t out_features() const { return is_gated() ? stored_rows() / 2 : stored_rows(); }
  int64_t stored_rows() const { return is_dense() ? w.size(0) : w4.n; }
};

// Whether rotary_kv may follow a chain that ends with `last`: no norms, heads of 64, 128 or 256.
bool can_follow(const FusedGemm& last, const RotaryKvParams& rotary);

constexpr int kMaxFollowing = 2;

struct FusedLayerParams {
  std::vector<FusedGemm> gemms;  // 1 to kMaxFusedGemms
  RotaryKvParams rotary{};       // behind the last; its qkv empty: none
  AttentionParams attention{};   // before the first; its out empty: none
  // What a chain launched behind this one reads first, up to kMaxFollowing: may be fetched ahead.
  std::vector<W4Weight> following{};
  Tensor memory;  // [fused_layer_bytes] uint8, prepared once by fused_layer_prepare
};

// What the kernel keeps between launches: counters, and room for the sums of slices of up to
// `max_rows` rows. Nothing where the kernel was not built.
int64_t fused_layer_bytes(int64_t max_rows);

// Whether `ctx` has the kernel.
bool fused_layer_runs(const Context& ctx);
void fused_layer_prepare(const Context& ctx, const Tensor& memory);
void fused_layer(const Context& ctx, const FusedLayerParams& params);

}  // namespace cpmcu
