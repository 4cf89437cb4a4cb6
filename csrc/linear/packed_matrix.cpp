#include "linear/packed_matrix.h"

#include <algorithm>

#include "kernels/gemm/gemm.h"

namespace cpmcu {
namespace {

constexpr int64_t kSliceBytes = 64 << 20;  // bytes of dequantised rows

}  // namespace

int64_t PackedMatrix::slice_rows() const {
  const int64_t block_rows_bytes = kPackedRows * weight_.k * size_of(dtype_);
  const int64_t blocks = std::max<int64_t>(1, kSliceBytes / block_rows_bytes);
  return std::min(weight_.n, blocks * kPackedRows);
}

void PackedMatrix::plan(MemoryPlan& plan, const std::string& name, DType dtype,
                        const StepLimits& limits, int64_t min_bytes) {
  dtype_ = dtype;
  blocks_id_ = plan.add(name, "weights", std::max(weight_.num_bytes(), min_bytes));
  if (limits.is_cuda()) {
    kept_rows_ = has_prompt_gemm(limits.compute_capability) ? 0 : slice_rows();
    scratch_floats_ = packed_scratch_floats(weight_, limits.max_tokens);
    fused_bytes_ = fused_layer_bytes(limits.max_decode_tokens);
  }
  slice_id_ = plan.add_scratch("packed.dequantized", kept_rows_ * weight_.k * size_of(dtype),
                               kEmbed, kSample);
  scratch_id_ = plan.add_scratch("packed.partials", 4 * scratch_floats_, kEmbed, kSample);
  fused_id_ = plan.add_scratch("fused_layer", fused_bytes_, 0, kLoad);
}

void PackedMatrix::bind(const Arena& arena) {
  weight_.blocks = arena.array<char>(blocks_id_);
  slice_ = arena.tensor(slice_id_, dtype_, {kept_rows_, weight_.k});
  if (scratch_floats_ > 0) scratch_ = arena.tensor(scratch_id_, DType::kF32, {scratch_floats_});
  fused_memory_ = arena.tensor(fused_id_, DType::kU8, {fused_bytes_});
}

bool PackedMatrix::multiplies_slices(const Context& ctx, Phase phase) const {
  return phase == Phase::kPrefill && ctx.cublas != nullptr &&
         !has_prompt_gemm(ctx.compute_capability);
}

void PackedMatrix::multiply(const Context& ctx, const Tensor& y, const Tensor& x, float alpha,
                            float beta) const {
  packed_gemm(ctx,
              {.y = y, .x = x, .w = weight_, .alpha = alpha, .beta = beta, .scratch = scratch_});
}

void PackedMatrix::forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x,
                           float alpha, float beta) const {
  if (!multiplies_slices(ctx, phase)) return multiply(ctx, y, x, alpha, beta);
  for (int64_t row = 0; row < weight_.n; row += slice_rows()) {
    const Tensor slice = slice_.rows(0, std::min(slice_rows(), weight_.n - row));
    packed_dequantize(ctx, {.out = slice, .w = weight_, .first_row = row});
    const Tensor columns(y.as<char>() + row * size_of(y.dtype()), y.dtype(),
                         {y.size(0), slice.size(0)});
    large_gemm(
        ctx,
        {.y = columns, .x = x, .w = slice, .alpha = alpha, .beta = beta, .y_stride = weight_.n});
  }
}

void PackedMatrix::forward_gated(const Context& ctx, Phase phase, const Tensor& out,
                                 const Tensor& gate_up, const Tensor& x) const {
  if (!multiplies_slices(ctx, phase)) return multiply(ctx, out, x, 1, 0);
  forward(ctx, phase, gate_up, x, 1, 0);
  silu_mul(ctx, {.out = out, .x = gate_up, .interleaved = true});
}

}  // namespace cpmcu
