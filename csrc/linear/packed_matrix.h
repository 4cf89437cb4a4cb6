// A matrix in weight blocks and its GEMM, shared by the linear methods of quantised weights.
#pragma once

#include <string>

#include "kernels/gemm/fused_layer.h"
#include "linear/linear.h"

namespace cpmcu {

class PackedMatrix {
 public:
  explicit PackedMatrix(const PackedWeight& weight) : weight_(weight) {}

  // `min_bytes`: minimum size of the weight buffer, for the checkpoint's tensors at load.
  void plan(MemoryPlan& plan, const std::string& name, DType dtype, const StepLimits& limits,
            int64_t min_bytes = 0);
  void bind(const Arena& arena);
  // Called before the first step.
  void prepare(const Context& ctx) { fused_layer_prepare(ctx, fused_memory_); }

  const PackedWeight& weight() const { return weight_; }
  FusedForm fused_form() const {
    return {.packed = weight_, .scratch = scratch_, .memory = fused_memory_};
  }

  // As LinearMethod::forward. If packed_gemm is slow with many rows and cuBLASLt is loaded, prefill
  // multiplies dequantised slices of W. A row's bits still depend on N and K only.
  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const;
  // As LinearMethod::forward_gated; the weight is gated.
  void forward_gated(const Context& ctx, Phase phase, const Tensor& out, const Tensor& gate_up,
                     const Tensor& x) const;

 private:
  bool multiplies_slices(const Context& ctx, Phase phase) const;
  void multiply(const Context& ctx, const Tensor& y, const Tensor& x, float alpha,
                float beta) const;
  int64_t slice_rows() const;

  PackedWeight weight_;
  DType dtype_ = DType::kBF16;
  int64_t kept_rows_ = 0, scratch_floats_ = 0, fused_bytes_ = 0;
  MemoryPlan::Id blocks_id_ = 0, slice_id_ = 0, scratch_id_ = 0, fused_id_ = 0;
  Tensor slice_;    // [slice_rows, K]: dequantised rows of W; empty: prefill does not dequantise
  Tensor scratch_;  // `scratch` of PackedGemmParams
  Tensor fused_memory_;  // `memory` of FusedLayerParams, shared by all matrices
};

}  // namespace cpmcu
