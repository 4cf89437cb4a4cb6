// A plugin that adds a block with an op of its own between two GEMMs: "scaled_mlp". CPU and float32
// only. Compiled by tests/unit/test_extension_points.py.
//
//   hidden += down(scale * (silu(gate(x)) * up(x)))     scale [I]: a checkpoint tensor
#include "layers/block.h"
#include "linear/linear.h"

namespace {

using namespace cpmcu;

class ScaledMlpBlock : public Block {
 public:
  explicit ScaledMlpBlock(const BlockConfig& config)
      : spec_(config.spec), mlp_(config.prefix + "mlp."), norm_(config.prefix) {
    config.params.check_known("a scaled_mlp block", {});
    const auto linear = [&](const std::string& name, LinearConfig of) {
      of.dtype = spec_.dtype;
      of.name = mlp_ + name;
      of.options = spec_.linear_options_of(of.name);
      return make_linear(spec_.linear_method_of(of.name), of);
    };
    gate_up_ = linear("gate_up_proj",
                      {.parts = {{mlp_ + "gate_proj", width()}, {mlp_ + "up_proj", width()}},
                       .in_features = spec_.hidden_size,
                       .gated = true});
    down_ = linear("down_proj",
                   {.parts = {{mlp_ + "down_proj", spec_.hidden_size}}, .in_features = width()});
  }

  void plan(MemoryPlan& plan, ModelState&, const StepLimits& limits) override {
    gate_up_->plan(plan, limits);
    down_->plan(plan, limits);
    scale_id_ = plan.add(mlp_ + "scale", "weights", 4 * width());
    max_tokens_ = limits.max_tokens;
    both_id_ = plan.add_scratch("scaled_mlp.both", 8 * max_tokens_ * width(), kMlp, kMlp + 3);
    act_id_ = plan.add_scratch("scaled_mlp.act", 4 * max_tokens_ * width(), kMlp, kMlp + 3);
  }
  void bind(const Arena& arena, const ModelState&) override {
    gate_up_->bind(arena);
    down_->bind(arena);
    scale_ = arena.tensor(scale_id_, DType::kF32, {width()});
    both_ = arena.tensor(both_id_, DType::kF32, {max_tokens_, 2 * width()});
    act_ = arena.tensor(act_id_, DType::kF32, {max_tokens_, width()});
  }
  void list_tensors(WeightTable& table) override {
    gate_up_->list_tensors(table);
    down_->list_tensors(table);
    table.add(mlp_ + "scale", scale_);
  }
  void finish_loading(const Context& ctx) override {
    gate_up_->finish_loading(ctx);
    down_->finish_loading(ctx);
  }
  std::string norm_name() const override { return norm_ + "post_attention_layernorm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const Value act = ops.value("scaled_mlp.act", act_);
    ops.gated(mlp_ + "gate_up_proj", *gate_up_, act, ops.value("scaled_mlp.both", both_), x);
    ops.call(
        mlp_ + "scale", {act}, {act},
        [=, this](const Context&, const Step&, const Rows& rows) {
          const Tensor all = rows(act);
          for (int64_t i = 0; i < all.num_elements(); ++i)
            all.as<float>()[i] *= scale_.as<float>()[i % width()];
        },
        scale_.num_bytes());
    ops.add_linear(mlp_ + "down_proj", *down_, hidden, act, spec_.residual_scale, /*adds=*/true);
  }

 private:
  int64_t width() const { return spec_.intermediate_size; }

  const ModelSpec& spec_;
  std::string mlp_, norm_;
  std::unique_ptr<LinearMethod> gate_up_, down_;
  MemoryPlan::Id scale_id_ = 0, both_id_ = 0, act_id_ = 0;
  int64_t max_tokens_ = 0;
  Tensor scale_, both_, act_;
};

REGISTER_BLOCK("scaled_mlp", ScaledMlpBlock);

}  // namespace
