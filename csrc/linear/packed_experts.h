// Experts in weight blocks and their GEMMs, shared by the expert methods of quantised weights.
#pragma once

#include <algorithm>

#include "linear/experts.h"

namespace cpmcu {

class PackedExpertLinear : public ExpertLinear {
 public:
  int64_t expert_bytes() const override { return weight_.num_bytes(); }
  void forward(const Context& ctx, const ExpertRows& rows) const override {
    packed_expert_gemm(ctx, {.rows = rows, .w = weight_, .stride = stride_});
  }
  void forward_sorted(const Context& ctx, const SortedRows& rows) const override {
    packed_sorted_gemm(ctx, {.rows = rows, .w = weight_, .stride = stride_});
  }

 protected:
  // `weight` describes one expert. `min_bytes`: minimum size of an expert's part of the buffer.
  PackedExpertLinear(const ExpertsConfig& config, const PackedWeight& weight, int64_t min_bytes = 0)
      : config_(config), weight_(weight) {
    constexpr int64_t kUnit = MemoryPlan::kAlignment;
    stride_ = (std::max(weight_.num_bytes(), min_bytes) + kUnit - 1) / kUnit * kUnit;
  }

  std::string name() const { return config_.prefix + config_.expert.stacked_name(); }
  void plan_blocks(MemoryPlan& plan) {
    id_ = plan.add(name(), "weights", config_.num_experts * stride_);
  }
  void bind_blocks(const Arena& arena) { weight_.blocks = arena.array<char>(id_); }

  PackedWeight of(int index) const {
    PackedWeight weight = weight_;
    weight.blocks = static_cast<char*>(weight_.blocks) + index * stride_;
    return weight;
  }

  const ExpertsConfig config_;

 private:
  PackedWeight weight_;  // weights of expert 0; those of the others follow
  int64_t stride_ = 0;
  MemoryPlan::Id id_ = 0;
};

}  // namespace cpmcu
