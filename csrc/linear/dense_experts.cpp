// Unquantised experts [E, N, K] in the model's dtype: "dense".
#include "linear/experts.h"

namespace cpmcu {
namespace {

class DenseExperts : public ExpertLinear {
 public:
  explicit DenseExperts(const ExpertsConfig& config) : config_(config) {}

  void plan(MemoryPlan& plan) override {
    const LinearConfig& expert = config_.expert;
    id_ = plan.add(
        config_.prefix + expert.stacked_name(), "weights",
        config_.num_experts * expert.out_features() * expert.in_features * size_of(expert.dtype));
  }

  void bind(const Arena& arena) override {
    const LinearConfig& expert = config_.expert;
    weight_ = arena.tensor(id_, expert.dtype,
                           {config_.num_experts, expert.out_features(), expert.in_features});
  }

  void list_tensors(WeightTable& table) override {
    for (int i = 0; i < config_.num_experts; ++i) {
      list_rows(table, config_.parts_of(i),
                weight_.rows(i, 1).view({weight_.size(1), weight_.size(2)}));
    }
  }

  int64_t expert_bytes() const override { return weight_.num_bytes() / config_.num_experts; }
  void forward(const Context& ctx, const ExpertRows& rows) const override {
    expert_gemm(ctx, {.rows = rows, .w = weight_, .gated = config_.expert.gated});
  }
  void forward_sorted(const Context& ctx, const SortedRows& rows) const override {
    sorted_gemm(ctx, {.rows = rows, .w = weight_, .gated = config_.expert.gated});
  }

 private:
  ExpertsConfig config_;
  MemoryPlan::Id id_ = 0;
  Tensor weight_;
};

REGISTER_EXPERTS("dense", DenseExperts);

}  // namespace
}  // namespace cpmcu
