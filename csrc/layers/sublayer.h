// A block of a layer with the norms around it:
//
//   hidden += block(norm(hidden))                         the usual form
//   hidden = (hidden + output_norm(block(...))) * scale   with output_norm; scale with output_scale
//
// These are parameters that a block of any kind may have: `input_norm` (default true),
// `output_norm`, `output_norm_eps` (default: the model's), `output_scale` (a checkpoint tensor
// [1]).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kernels/layer/norm_add.h"
#include "layers/block.h"

namespace cpmcu {

class Sublayer {
 public:
  Sublayer(int layer, const std::string& kind, BlockConfig config)
      : spec_(&config.spec), layer_(layer), eps_(config.spec.rms_norm_eps) {
    Params rest;  // the parameters that the block itself reads
    for (const auto& [name, value] : config.params.values()) {
      if (!is_own(name)) rest.set(name, value);
    }
    const Params own = std::exchange(config.params, rest);
    const bool norms_input = own.flag("input_norm", true), scales = own.flag("output_scale", false);
    config.adds = !own.flag("output_norm", false);
    eps_ = own.number("output_norm_eps", eps_);
    CHECK(config.adds ? !scales : spec_->residual_scale == 1,
          "{}{} has an output_scale without output_norm, or a residual scale beside it; expected "
          "output_norm with the first and not with the last",
          config.prefix, kind);
    block_ = BlockRegistry::instance().create("block", kind, config);
    if (norms_input) norm_.emplace(*spec_, block_->norm_name());
    output_norm_name_ = config.prefix + kind + "_output_norm";
    if (!config.adds) output_norm_.emplace(*spec_, output_norm_name_);
    if (scales) scale_name_ = config.prefix + kind + "_output_scale";
  }

  int layer() const { return layer_; }
  Block& block() const { return *block_; }
  bool norms_output() const { return output_norm_.has_value(); }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) {
    if (norm_) norm_->plan(plan);
    block_->plan(plan, state, limits);
    if (output_norm_) output_norm_->plan(plan);
    if (!scale_name_.empty()) scale_id_ = plan.add(scale_name_, "weights", size_of(spec_->dtype));
  }
  void bind(const Arena& arena, const ModelState& state) {
    if (norm_) norm_->bind(arena);
    block_->bind(arena, state);
    if (output_norm_) output_norm_->bind(arena);
    if (!scale_name_.empty()) scale_ = arena.tensor(scale_id_, spec_->dtype, {1});
  }
  void list_tensors(WeightTable& table) {
    if (norm_) norm_->list_tensors(table);
    block_->list_tensors(table);
    if (output_norm_) output_norm_->list_tensors(table);
    if (!scale_name_.empty()) table.add(scale_name_, scale_);
  }
  // `normed` and `branch` [T, H] are scratch; branch is not used without output_norm.
  void append(OpList& ops, const Value& hidden, const Value& normed, const Value& branch) const {
    if (norm_) norm_->append(ops, normed, hidden);
    block_->append(ops, output_norm_ ? branch : hidden, norm_ ? normed : hidden);
    if (!output_norm_) return;
    ops.call(
        output_norm_name_, {hidden, branch}, {hidden},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          norm_add(ctx, {.hidden = rows(hidden),
                         .x = rows(branch),
                         .weight = output_norm_->weight(),
                         .eps = eps_,
                         .weight_offset = spec_->norm_offset(),
                         .scale = scale_});
        },
        output_norm_->weight().num_bytes());
  }

 private:
  static bool is_own(const std::string& name) {
    return name == "input_norm" || name == "output_norm" || name == "output_norm_eps" ||
           name == "output_scale";
  }

  const ModelSpec* spec_;
  int layer_;
  float eps_;  // eps of the output norm
  std::optional<RmsNorm> norm_, output_norm_;
  std::unique_ptr<Block> block_;
  std::string output_norm_name_;
  std::string scale_name_;  // name of the output_scale's tensor; empty: there is none
  MemoryPlan::Id scale_id_ = 0;
  Tensor scale_;  // [1]: output_scale
};

}  // namespace cpmcu
