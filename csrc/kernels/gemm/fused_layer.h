// The GEMMs of a decoder layer that depend on one another, as one kernel: o, gate and up, down, and
// the qkv of the next layer.
//
// GEMM i computes y = alpha * x W^T + beta * y + bias, as packed_gemm or skinny_gemm does. If a
// GEMM has a norm, `normed` stands for the RMS-normed rows of y, and the next GEMM reads it. The
// contents of `normed` after the launch are unspecified. All W have one layout of weight blocks (of
// one plane), or all have 16 bits. y has the dtype of x.
//
// If a GEMM has a `part`, its inputs are divided among ranks: y = the sum of alpha * x W^T of all
// ranks + beta * y, as rank_sum computes it from rounded parts. All ranks then launch the same
// GEMMs for equal numbers of rows.
//
// The first x may be the `out` of attention_splits: the kernel combines the splits first. The last
// y may be the qkv of rotary_kv: the kernel then applies rotary_kv with the same bits. Of this y,
// only the elements that rotary_kv writes are specified.
//
// The CTAs wait for one another, so all of them must be resident at once. Only one such launch may
// run on a device at a time (engine/graph_runner.h ensures it within a process). The kernel is not
// used on a device that processes share through MPS.
//
// On the CPU the GEMMs are launched one by one. GPUs other than Hopper have the kernel for some
// forms of W (FusedForms). If there is only one GEMM, of weight blocks and without rotary_kv, it is
// always a launch of packed_gemm: it is faster.
#pragma once

#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/gemm/packed/packed.h"
#include "kernels/layer/rotary_kv.h"

namespace cpmcu {

constexpr int kMaxFusedGemms = 4;
// Bytes of FusedLayerParams::memory that hold state; the rest holds partial sums.
constexpr int kFusedStateBytes = 256 * 1024;
constexpr int kMaxFusedCtas = 192;  // maximum number of CTAs, one for each SM of the largest chip
// Maximum number of rows of a launch on Hopper. It is 64 elsewhere and for other layouts.
constexpr int kMaxFusedRows = 128;
// Up to this many groups of 8 rows, each fragment of partial sums carries its own ready flag. For
// more rows the kernel counts arrivals, and the partial sums lie at another address.
constexpr int kMaxFlaggedGroups = 2;
// Bytes of the partial sums of 8 rows.
constexpr int64_t kFusedSumBytes = int64_t{kMaxFusedCtas} * kPackedRows * 8 * 4;

struct FusedGemm {
  Tensor y;               // [M, N] (gated: [M, N / 2])
  Tensor x;               // [M, K]
  PackedWeight packed{};  // W in weight blocks; empty if `w` is given
  Tensor w{};             // W in 16 bits: [N, K], x's dtype; empty if `packed` is given
  bool gated = false;     // rows [0, N / 2) of W are gate, the others up
  float alpha = 1;        // factor of x W^T, as in GemmParams; 1 if gated
  float beta = 0;
  // [M, N], y's dtype: scratch of a GEMM that is divided among ranks. Empty: the GEMM is not
  // divided.
  Tensor part{};
  // [1, N], y's dtype; empty: no bias. A bias excludes a norm, a gate and rotary_kv.
  Tensor bias{};
  // Used if the kernel does not run: packed_gemm's scratch, or [M, N] for a gated 16-bit W.
  Tensor scratch{};
  Tensor normed{};       // [M, N]: the norm of y; empty: no norm
  Tensor norm_weight{};  // [N]
  float norm_eps = 0;
  float norm_offset = 0;  // added to norm_weight

  bool is_dense() const { return !w.empty(); }
  bool is_gated() const { return is_dense() ? gated : packed.gated; }
  int64_t out_features() const { return is_gated() ? stored_rows() / 2 : stored_rows(); }
  int64_t stored_rows() const { return is_dense() ? w.size(0) : packed.n; }
};

// W as the kernel reads it: in weight blocks, or in 16 bits.
struct FusedForm {
  PackedWeight packed{};
  Tensor w{};
  Tensor scratch{};  // scratch of packed_gemm, for launches that are not fused
  Tensor memory{};   // `memory` of FusedLayerParams
};

// The forms of W that the kernel reads on a device.
enum class FusedForms {
  kNone,      // none: the kernel does not run
  kPortable,  // on GPUs other than Hopper: 4-bit layouts, int8, e4m3 without group scales
  kAll,       // on Hopper: all layouts of weight blocks, and 16-bit W
};
// Whether the kernel reads this layout of weight blocks. It has no instances for int4 by 16, which
// few checkpoints have.
inline bool fuses(FusedForms forms, const PackedLayout& layout) {
  const bool is_portable = layout.bits() == 4 || layout.codes == Codes::kInt8 ||
                           (layout.codes == Codes::kE4m3 && layout.group == 0);
  return (forms == FusedForms::kAll || (forms == FusedForms::kPortable && is_portable)) &&
         layout.planes == 1 && layout.codes != Codes::kOther &&
         (layout.codes != Codes::kInt4 || layout.group != 16);
}
// Whether the kernel can apply rotary_kv: no q/k norm, no fp8 cache, head_dim 64, 128 or 256. Its
// qkv is y of the last GEMM, which is not gated and has beta = 0.
bool can_follow(const RotaryKvParams& rotary);

constexpr int kMaxFollowing = 2;

struct FusedLayerParams {
  std::vector<FusedGemm> gemms;  // 1 to kMaxFusedGemms
  RotaryKvParams rotary{};       // runs after the last GEMM; if its qkv is empty, it does not run
  // Runs before the first GEMM; if its `out` is empty, it does not run.
  AttentionParams attention{};
  // The first weights of the next fused layer launch, which the kernel may prefetch to L2. At most
  // kMaxFollowing.
  std::vector<PackedWeight> following{};
  Tensor memory;  // [fused_layer_bytes] uint8, initialised once by fused_layer_prepare
};

// Bytes of the counters kept between launches and of the partial sums of up to `max_rows` rows. 0
// if the kernel is not built.
int64_t fused_layer_bytes(int64_t max_rows);

// The forms of W that this build's kernel reads on the device of `ctx`.
FusedForms fused_forms(const Context& ctx);
// The same for a build for compute capability 10 * major + minor; 0: the CPU.
FusedForms fused_forms_of(int capability);
void fused_layer_prepare(const Context& ctx, const Tensor& memory);
void fused_layer(const Context& ctx, const FusedLayerParams& params);

}  // namespace cpmcu
