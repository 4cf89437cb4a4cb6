// Gated MLP, down(act(gate(x)) * up(x)): "mlp". act is SiLU, or as `activation` says. The squared
// ReLU has no gate: down(relu(up(x))^2).
#include "layers/block.h"
#include "layers/gating.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

class MlpBlock : public Block {
 public:
  explicit MlpBlock(const BlockConfig& config)
      : spec_(config.spec),
        width_(config.params.integer("intermediate_size", spec_.intermediate_size)),
        prefix_(config.prefix),
        phase_(config.phase),
        adds_(config.adds),
        activation_(gating_of(config.params)) {
    config.params.check_known("an mlp block", {"intermediate_size", "activation"});
    CHECK(width_ >= 8 && width_ % 8 == 0,
          "{}mlp: intermediate_size is {}, expected a positive multiple of 8", prefix_, width_);
    const std::string mlp = prefix_ + "mlp.";
    std::vector<LinearPart> parts{{mlp + "up_proj", width_}};
    if (activation_.is_gated()) parts.insert(parts.begin(), {mlp + "gate_proj", width_});
    up_name_ = mlp + (activation_.is_gated() ? "gate_up_proj" : "up_proj");
    gate_up_ =
        make_linear(spec_.linear_method_of(up_name_), {.parts = parts,
                                                       .in_features = spec_.hidden_size,
                                                       .dtype = spec_.dtype,
                                                       .options = spec_.linear_options_of(up_name_),
                                                       .name = up_name_,
                                                       .gated = activation_.is_silu()});
    down_ = make_linear(spec_.linear_method_of(mlp + "down_proj"),
                        {.parts = {{mlp + "down_proj", spec_.hidden_size}},
                         .in_features = width_,
                         .dtype = spec_.dtype,
                         .options = spec_.linear_options_of(mlp + "down_proj")});
  }

  void plan(MemoryPlan& plan, ModelState&, const StepLimits& limits) override {
    gate_up_->plan(plan, limits);
    down_->plan(plan, limits);
    const int64_t bytes = limits.max_tokens * size_of(spec_.dtype);
    gate_up_id_ = plan.add_scratch("mlp.gate_up", bytes * up_columns(), phase_ + 1, phase_ + 2);
    act_id_ = plan.add_scratch("mlp.act", bytes * width_, phase_ + 1, phase_ + 3);
    max_tokens_ = limits.max_tokens;
  }

  void bind(const Arena& arena, const ModelState&) override {
    gate_up_->bind(arena);
    down_->bind(arena);
    gate_up_buffer_ = arena.tensor(gate_up_id_, spec_.dtype, {max_tokens_, up_columns()});
    act_buffer_ = arena.tensor(act_id_, spec_.dtype, {max_tokens_, width_});
  }

  void list_tensors(WeightTable& table) override {
    gate_up_->list_tensors(table);
    down_->list_tensors(table);
  }

  void finish_loading(const Context& ctx) override {
    gate_up_->finish_loading(ctx);
    down_->finish_loading(ctx);
  }

  std::string norm_name() const override { return prefix_ + "post_attention_layernorm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const std::string mlp = prefix_ + "mlp.";
    const Value gate_up = ops.value("mlp.gate_up", gate_up_buffer_);
    const Value act = ops.value("mlp.act", act_buffer_);
    if (activation_.is_silu()) {
      ops.gated(up_name_, *gate_up_, act, gate_up, x);
    } else {
      ops.linear(up_name_, *gate_up_, gate_up, x);
      ops.call(mlp + "activation", {gate_up}, {act},
               [=, this](const Context& ctx, const Step&, const Rows& rows) {
                 gated_activation(ctx,
                                  {.out = rows(act), .x = rows(gate_up), .kind = activation_.kind});
               });
    }
    ops.add_linear(mlp + "down_proj", *down_, hidden, act, spec_.residual_scale, adds_);
  }

 private:
  int64_t up_columns() const { return activation_.columns(width_); }

  const ModelSpec& spec_;
  int width_;  // intermediate_size
  std::string prefix_;
  Timeline phase_;
  bool adds_;  // BlockConfig::adds
  Gating activation_;
  std::string up_name_;  // name of the linear layer gate_up_
  std::unique_ptr<LinearMethod> gate_up_, down_;
  MemoryPlan::Id gate_up_id_ = 0, act_id_ = 0;
  int64_t max_tokens_ = 0;
  Tensor gate_up_buffer_, act_buffer_;
};

REGISTER_BLOCK("mlp", MlpBlock);

}  // namespace
}  // namespace cpmcu
