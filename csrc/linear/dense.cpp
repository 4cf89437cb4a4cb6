// Unquantised weights [N, K] in the model's dtype: "dense".
#include "kernels/gemm/gemm.h"
#include "kernels/layer/gather_rows.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

class DenseLinear : public LinearMethod {
 public:
  explicit DenseLinear(const LinearConfig& config) : config_(config) {}

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    const int64_t elements = config_.out_features() * config_.in_features;
    weight_id_ = plan.add(config_.parts.front().name, "weights", elements * size_of(config_.dtype));
    if (limits.is_cuda()) fused_bytes_ = fused_layer_bytes(limits.max_decode_tokens);
    fused_id_ = plan.add_scratch("fused_layer", fused_bytes_, 0, kLoad);
  }

  void bind(const Arena& arena) override {
    weight_ =
        arena.tensor(weight_id_, config_.dtype, {config_.out_features(), config_.in_features});
    fused_memory_ = arena.tensor(fused_id_, DType::kU8, {fused_bytes_});
  }

  void list_tensors(WeightTable& table) override { list_rows(table, config_.parts, weight_); }

  void finish_loading(const Context& ctx) override { fused_layer_prepare(ctx, fused_memory_); }

  void load_rows(const Context& ctx, const Tensor& source, const int* index) override {
    gather_rows(ctx, {.out = weight_, .x = source, .index = index});
  }

  Tensor dense_weight() const override { return weight_; }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    const GemmParams params{.y = y, .x = x, .w = weight_, .alpha = alpha, .beta = beta};
    phase == Phase::kPrefill ? large_gemm(ctx, params) : skinny_gemm(ctx, params);
  }

  void forward_gated(const Context& ctx, Phase phase, const Tensor& out, const Tensor& gate_up,
                     const Tensor& x) const override {
    if (phase == Phase::kPrefill) {
      return gated_gemm(ctx, {.out = out, .x = x, .w = weight_, .scratch = gate_up});
    }
    LinearMethod::forward_gated(ctx, phase, out, gate_up, x);
  }

  std::optional<FusedForm> fused_form() const override {
    return FusedForm{.w = weight_, .memory = fused_memory_};
  }
  int64_t weight_bytes() const override { return weight_.num_bytes(); }

 private:
  LinearConfig config_;
  int64_t fused_bytes_ = 0;
  MemoryPlan::Id weight_id_ = 0, fused_id_ = 0;
  Tensor weight_;
  Tensor fused_memory_;  // fused_layer's, shared by all matrices
};

REGISTER_LINEAR("dense", DenseLinear);

}  // namespace
}  // namespace cpmcu
