// Methods "w4_rtn" and "w8_rtn": dense rows rounded to the nearest of 15 or 239 levels at load.
//
// Heads use them, because checkpoints do not quantise heads, and drafts whose files have 16 bits.
// Of experts there is "w4_rtn" only. The dense rows stay in scratch until the first step.
#include "linear/packed_experts.h"
#include "linear/packed_matrix.h"

namespace cpmcu {
namespace {

PackedWeight rounded(const LinearConfig& config, int planes) {
  return {.n = config.out_features(),
          .k = config.in_features,
          .layout = {.planes = planes,
                     .scale_dtype = config.dtype == DType::kBF16 ? DType::kBF16 : DType::kF16},
          .gated = config.gated};
}
int64_t dense_bytes(const LinearConfig& config) {
  return config.out_features() * config.in_features * size_of(config.dtype);
}

template <int kPlanes>
class RoundedLinear : public LinearMethod {
 public:
  explicit RoundedLinear(const LinearConfig& config)
      : config_(config), matrix_(rounded(config, kPlanes)) {}

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    matrix_.plan(plan, config_.stacked_name(), config_.dtype, limits);
    if (!config_.has_tensors) return;
    dense_id_ =
        plan.add_scratch(config_.stacked_name() + ".dense", dense_bytes(config_), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    matrix_.bind(arena);
    if (!config_.has_tensors) return;
    dense_ = arena.tensor(dense_id_, config_.dtype, {config_.out_features(), config_.in_features});
  }

  void list_tensors(WeightTable& table) override { list_rows(table, config_.parts, dense_); }

  void finish_loading(const Context& ctx) override {
    packed_quantize(ctx, {.w = matrix_.weight(), .x = dense_});
    matrix_.prepare(ctx);
  }

  void load_rows(const Context& ctx, const Tensor& source, const int* index) override {
    packed_quantize(ctx, {.w = matrix_.weight(), .x = source, .index = index});
  }

  Tensor dense_weight() const override { return dense_; }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    matrix_.forward(ctx, phase, y, x, alpha, beta);
  }

  void forward_gated(const Context& ctx, Phase phase, const Tensor& out, const Tensor& gate_up,
                     const Tensor& x) const override {
    matrix_.forward_gated(ctx, phase, out, gate_up, x);
  }

  std::optional<FusedForm> fused_form() const override { return matrix_.fused_form(); }
  int64_t weight_bytes() const override { return matrix_.weight().num_bytes(); }

 private:
  LinearConfig config_;
  PackedMatrix matrix_;
  MemoryPlan::Id dense_id_ = 0;
  Tensor dense_;
};

class RoundedExperts : public PackedExpertLinear {
 public:
  explicit RoundedExperts(const ExpertsConfig& config)
      : PackedExpertLinear(config, rounded(config.expert, 1)) {}

  void plan(MemoryPlan& plan) override {
    plan_blocks(plan);
    dense_id_ = plan.add_scratch(name() + ".dense",
                                 config_.num_experts * dense_bytes(config_.expert), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    bind_blocks(arena);
    const LinearConfig& expert = config_.expert;
    dense_ = arena.tensor(dense_id_, expert.dtype,
                          {config_.num_experts, expert.out_features(), expert.in_features});
  }

  void list_tensors(WeightTable& table) override {
    for (int i = 0; i < config_.num_experts; ++i) {
      list_rows(table, config_.parts_of(i), dense_of(i));
    }
  }

  void finish_loading(const Context& ctx) override {
    for (int i = 0; i < config_.num_experts; ++i) {
      packed_quantize(ctx, {.w = of(i), .x = dense_of(i)});
    }
  }

 private:
  Tensor dense_of(int index) const {
    return dense_.rows(index, 1).view({dense_.size(1), dense_.size(2)});
  }

  MemoryPlan::Id dense_id_ = 0;
  Tensor dense_;
};

using Rounded4 = RoundedLinear<1>;
using Rounded8 = RoundedLinear<2>;
REGISTER_LINEAR("w4_rtn", Rounded4);
REGISTER_LINEAR("w8_rtn", Rounded8);
REGISTER_EXPERTS("w4_rtn", RoundedExperts);

}  // namespace
}  // namespace cpmcu
