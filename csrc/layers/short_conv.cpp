// Gated short convolution, the layers without attention of LFM2: "short_conv".
//
// Parameters: `conv_kernel` (3), of the convolution, the token itself included, and `channels`
// (hidden_size). There are no biases.
#include "kernels/short_conv/short_conv.h"

#include "layers/block.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

class ShortConvBlock : public Block {
 public:
  explicit ShortConvBlock(const BlockConfig& config)
      : spec_(config.spec),
        kernel_size_(config.params.integer("conv_kernel", 3)),
        channels_(config.params.integer("channels", spec_.hidden_size)),
        prefix_(config.prefix),
        phase_(config.phase),
        adds_(config.adds) {
    config.params.check_known("a short_conv block", {"conv_kernel", "channels"});
    CHECK(kernel_size_ >= 2 && kernel_size_ <= kMaxConvTaps,
          "a short_conv block has a conv_kernel of {}, expected 2 to {}", kernel_size_,
          kMaxConvTaps);
    CHECK(channels_ >= 8 && channels_ % 8 == 0,
          "a short_conv block has {} channels, expected a positive multiple of 8", channels_);
    // The blocks of a draft do not learn which tokens a step accepted.
    CHECK(config.scope.empty(), "a draft model has short_conv blocks, which only a target can");
    const auto linear = [&](const std::string& name, int64_t rows, int64_t columns) {
      const std::string module = prefix_ + "conv." + name;
      return make_linear(spec_.linear_method_of(module),
                         {.parts = {{module, rows}},
                          .in_features = columns,
                          .dtype = spec_.dtype,
                          .options = spec_.linear_options_of(module),
                          .name = module});
    };
    in_ = linear("in_proj", 3 * channels_, spec_.hidden_size);
    out_ = linear("out_proj", spec_.hidden_size, channels_);
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    in_->plan(plan, limits);
    out_->plan(plan, limits);
    const std::string module = prefix_ + "conv.";
    const int64_t bytes = size_of(spec_.dtype);
    weight_id_ = plan.add(module + "conv", "weights", bytes * channels_ * kernel_size_);
    window_id_ = state.add_slot(
        {.name = module + "window", .shape = {kernel_size_ - 1, channels_}, .dtype = spec_.dtype});
    folded_id_ =
        state.add_slot({.name = module + "folded", .shape = {channels_}, .dtype = DType::kI32});
    pending_id_ = state.add_slot({.name = module + "pending",
                                  .shape = {limits.max_tree_size, channels_},
                                  .dtype = spec_.dtype,
                                  .transient = true});
    max_tokens_ = limits.max_tokens;
    in_buffer_id_ = plan.add_scratch("short_conv.bcx", 3 * bytes * max_tokens_ * channels_,
                                     phase_ + 1, phase_ + 2);
    out_buffer_id_ =
        plan.add_scratch("short_conv.out", bytes * max_tokens_ * channels_, phase_ + 2, phase_ + 3);
  }

  void bind(const Arena& arena, const ModelState& state) override {
    in_->bind(arena);
    out_->bind(arena);
    weight_ = arena.tensor(weight_id_, spec_.dtype, {channels_, kernel_size_});
    window_ = state.per_slot(window_id_);
    folded_ = state.per_slot(folded_id_);
    pending_ = state.per_slot(pending_id_);
    in_buffer_ = arena.tensor(in_buffer_id_, spec_.dtype, {max_tokens_, 3 * channels_});
    out_buffer_ = arena.tensor(out_buffer_id_, spec_.dtype, {max_tokens_, channels_});
  }

  void list_tensors(WeightTable& table) override {
    in_->list_tensors(table);
    out_->list_tensors(table);
    table.add(prefix_ + "conv.conv.weight", weight_.view({channels_, 1, kernel_size_}));
    table.set_sections(prefix_ + "conv.in_proj", {channels_, channels_, channels_});
  }

  void finish_loading(const Context& ctx) override {
    in_->finish_loading(ctx);
    out_->finish_loading(ctx);
  }

  std::string norm_name() const override { return prefix_ + "input_layernorm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const std::string module = prefix_ + "conv.";
    const Value bcx = ops.value("short_conv.bcx", in_buffer_);
    const Value out = ops.value("short_conv.out", out_buffer_);
    ops.linear(module + "in_proj", *in_, bcx, x);
    ops.call(
        module + "conv", {bcx}, {out},
        [=, this](const Context& ctx, const Step& step, const Rows& rows) {
          short_conv(ctx, {.out = rows(out),
                           .x = rows(bcx),
                           .weight = weight_,
                           .window = window_,
                           .pending = pending_,
                           .folded = folded_,
                           .accepted = step.accepted,
                           .commits = step.phase == Phase::kPrefill,
                           .tokens = step.tokens});
        },
        weight_.num_bytes());
    ops.add_linear(module + "out_proj", *out_, hidden, out, spec_.residual_scale, adds_);
  }

 private:
  const ModelSpec& spec_;
  int kernel_size_;
  int64_t channels_;
  std::string prefix_;
  Timeline phase_;
  bool adds_;  // BlockConfig::adds
  std::unique_ptr<LinearMethod> in_, out_;
  MemoryPlan::Id weight_id_ = 0, in_buffer_id_ = 0, out_buffer_id_ = 0;
  ModelState::SlotId window_id_, folded_id_, pending_id_;
  int64_t max_tokens_ = 0;
  Tensor weight_, window_, folded_, pending_;  // as in ShortConvParams
  Tensor in_buffer_, out_buffer_;
};

REGISTER_BLOCK("short_conv", ShortConvBlock);

}  // namespace
}  // namespace cpmcu
