// RMSNorm with its weight.
#pragma once

#include "core/arena.h"
#include "core/model_spec.h"
#include "core/weights.h"
#include "kernels/layer/rms_norm.h"
#include "pass/op_list.h"

namespace cpmcu {

class RmsNorm {
 public:
  // `width`: H, if it is not the model's hidden_size.
  // `plain`: it multiplies by the weight, whatever the spec's zero_centred_norms is.
  RmsNorm(const ModelSpec& spec, std::string name, int64_t width = 0, bool plain = false)
      : spec_(&spec),
        name_(std::move(name)),
        width_(width > 0 ? width : spec.hidden_size),
        offset_(plain ? 0 : spec.norm_offset()) {}

  void plan(MemoryPlan& plan) { id_ = plan.add(name_, "weights", width_ * size_of(spec_->dtype)); }
  void bind(const Arena& arena) { weight_ = arena.tensor(id_, spec_->dtype, {width_}); }
  void list_tensors(WeightTable& table) { table.add(name_ + ".weight", weight_); }
  const Tensor& weight() const { return weight_; }
  // Row r of out = norm of row index[r] of x; `index` is in device memory, null: row r.
  // `out_stride`: elements between rows of out; 0: H.
  void forward(const Context& ctx, const Tensor& out, const Tensor& x, int64_t out_stride = 0,
               const int* index = nullptr) const {
    RmsNormParams norm = params();
    norm.out = out, norm.x = x, norm.out_stride = out_stride, norm.index = index;
    rms_norm(ctx, norm);
  }
  // out = norm of x, as an op of a pass.
  void append(OpList& ops, const Value& out, const Value& x) const {
    ops.norm(name_, out, x, params());
  }

 private:
  RmsNormParams params() const {
    return {.out = {},
            .x = {},
            .weight = weight_,
            .eps = spec_->rms_norm_eps,
            .weight_offset = offset_};
  }

  const ModelSpec* spec_;
  std::string name_;
  int64_t width_;
  float offset_;  // number that is added to each weight
  MemoryPlan::Id id_ = 0;
  Tensor weight_;  // [H]
};

}  // namespace cpmcu
