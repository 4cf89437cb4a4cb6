// Unquantised weights [N, K] in the model's dtype: "dense".
#include "kernels/gather_rows.h"
#include "kernels/gemm/gemm.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

class DenseLinear : public LinearMethod {
 public:
  explicit DenseLinear(const LinearConfig& config) : config_(config) {}

  void plan(MemoryPlan& plan, const StepLimits&) override {
    const int64_t elements = config_.out_features() * config_.in_features;
    weight_id_ = plan.add(config_.parts.front().name, "weights", elements * size_of(config_.dtype));
  }

  void bind(const Arena& arena) override {
    weight_ =
        arena.tensor(weight_id_, config_.dtype, {config_.out_features(), config_.in_features});
  }

  void list_tensors(WeightTable& table) override { list_rows(table, config_.parts, weight_); }

  void load_rows(const Context& ctx, const Tensor& source, const int* index) override {
    gather_rows(ctx, {.out = weight_, .x = source, .index = index});
  }

  Tensor dense_weight() const override { return weight_; }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    const GemmParams params{.y = y, .x = x, .w = weight_, .alpha = alpha, .beta = beta};
    phase == Phase::kPrefill ? large_gemm(ctx, params) : skinny_gemm(ctx, params);
  }

 private:
  LinearConfig config_;
  MemoryPlan::Id weight_id_ = 0;
  Tensor weight_;
};

REGISTER_LINEAR("dense", DenseLinear);

}  // namespace
}  // namespace cpmcu
