// RMSNorm with its weight.
#pragma once

#include "core/arena.h"
#include "core/model_spec.h"
#include "core/weights.h"
#include "kernels/rms_norm.h"

namespace cpmcu {

class RmsNorm {
 public:
  RmsNorm(const ModelSpec& spec, std::string name) : spec_(&spec), name_(std::move(name)) {}

  void plan(MemoryPlan& plan) {
    id_ = plan.add(name_, "weights", spec_->hidden_size * size_of(spec_->dtype));
  }
  void bind(const Arena& arena) { weight_ = arena.tensor(id_, spec_->dtype, {spec_->hidden_size}); }
  void list_tensors(WeightTable& table) { table.add(name_ + ".weight", weight_); }
  void forward(const Context& ctx, const Tensor& out, const Tensor& x) const {
    rms_norm(ctx, {.out = out, .x = x, .weight = weight_, .eps = spec_->rms_norm_eps});
  }

 private:
  const ModelSpec* spec_;
  std::string name_;
  MemoryPlan::Id id_ = 0;
  Tensor weight_;  // [H]
};

}  // namespace cpmcu
