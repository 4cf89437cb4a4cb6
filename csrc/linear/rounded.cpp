// Linear methods "w4_rtn" and "w8_rtn": dense rows rounded to the nearest of 15 or 239 levels at
// load.
//
// Heads use these methods, because checkpoints do not quantise heads. The dense rows stay in
// scratch until the first step.
#include "linear/packed_matrix.h"

namespace cpmcu {
namespace {

template <int kPlanes>
class RoundedLinear : public LinearMethod {
 public:
  explicit RoundedLinear(const LinearConfig& config)
      : config_(config),
        matrix_({.n = config.out_features(),
                 .k = config.in_features,
                 .layout = {
                     .planes = kPlanes,
                     .scale_dtype = config.dtype == DType::kBF16 ? DType::kBF16 : DType::kF16}}) {}

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    matrix_.plan(plan, config_.stacked_name(), config_.dtype, limits);
    if (!config_.has_tensors) return;
    const int64_t elements = config_.out_features() * config_.in_features;
    dense_id_ = plan.add_scratch(config_.stacked_name() + ".dense",
                                 elements * size_of(config_.dtype), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    matrix_.bind(arena);
    if (!config_.has_tensors) return;
    dense_ = arena.tensor(dense_id_, config_.dtype, {config_.out_features(), config_.in_features});
  }

  void list_tensors(WeightTable& table) override { list_rows(table, config_.parts, dense_); }

  void finish_loading(const Context& ctx) override {
    packed_quantize(ctx, {.w = matrix_.weight(), .x = dense_});
  }

  void load_rows(const Context& ctx, const Tensor& source, const int* index) override {
    packed_quantize(ctx, {.w = matrix_.weight(), .x = source, .index = index});
  }

  Tensor dense_weight() const override { return dense_; }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    matrix_.forward(ctx, phase, y, x, alpha, beta);
  }

  std::optional<FusedForm> fused_form() const override { return matrix_.fused_form(); }
  int64_t weight_bytes() const override { return matrix_.weight().num_bytes(); }

 private:
  LinearConfig config_;
  PackedMatrix matrix_;
  MemoryPlan::Id dense_id_ = 0;
  Tensor dense_;
};

using Rounded4 = RoundedLinear<1>;
using Rounded8 = RoundedLinear<2>;
REGISTER_LINEAR("w4_rtn", Rounded4);
REGISTER_LINEAR("w8_rtn", Rounded8);

}  // namespace
}  // namespace cpmcu
