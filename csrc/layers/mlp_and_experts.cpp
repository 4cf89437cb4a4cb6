// An MLP and experts side by side, each with norms of its own (Gemma 4): "mlp_and_experts".
//
//   y = norm_1(mlp(norm(h))) + norm_2(moe(h)), h the residual stream
//
// Parameters: those of moe, which norms h itself (router_norm), and `mlp_intermediate_size`. The
// block has input_norm false and output_norm (sublayer.h).
#include <optional>

#include "kernels/layer/norm_add.h"
#include "kernels/layer/norm_heads.h"
#include "layers/block.h"

namespace cpmcu {
namespace {

class MlpAndExpertsBlock : public Block {
 public:
  explicit MlpAndExpertsBlock(const BlockConfig& config)
      : spec_(config.spec),
        prefix_(config.prefix),
        phase_(config.phase),
        norm_1_(spec_, prefix_ + "mlp_output_norm_1"),
        norm_2_(spec_, prefix_ + "mlp_output_norm_2") {
    CHECK(!config.adds, "an mlp_and_experts block has no output_norm, expected one");
    BlockConfig mlp = config, moe = config;
    mlp.params = moe.params = Params();
    for (const auto& [name, value] : config.params.values()) {
      if (name == "mlp_intermediate_size") {
        mlp.params.set("intermediate_size", value);
      } else {
        moe.params.set(name, value);
        if (name == "activation") mlp.params.set(name, value);
      }
    }
    CHECK(moe.params.flag("router_norm", false),
          "an mlp_and_experts block has no router_norm, expected it: its input has no norm");
    mlp_ = BlockRegistry::instance().create("block", "mlp", mlp);
    moe_ = BlockRegistry::instance().create("block", "moe", moe);
    norm_.emplace(spec_, mlp_->norm_name());
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    for (RmsNorm* norm : {&*norm_, &norm_1_, &norm_2_}) norm->plan(plan);
    mlp_->plan(plan, state, limits);
    moe_->plan(plan, state, limits);
    max_tokens_ = limits.max_tokens;
    const int64_t bytes = max_tokens_ * spec_.hidden_size * size_of(spec_.dtype);
    normed_id_ = plan.add_scratch("mlp_and_experts.normed", bytes, phase_, phase_ + 1);
    experts_id_ = plan.add_scratch("mlp_and_experts.experts", bytes, phase_ + 1, phase_ + 3);
  }
  void bind(const Arena& arena, const ModelState& state) override {
    for (RmsNorm* norm : {&*norm_, &norm_1_, &norm_2_}) norm->bind(arena);
    mlp_->bind(arena, state);
    moe_->bind(arena, state);
    normed_ = arena.tensor(normed_id_, spec_.dtype, {max_tokens_, spec_.hidden_size});
    experts_ = arena.tensor(experts_id_, spec_.dtype, {max_tokens_, spec_.hidden_size});
  }
  void list_tensors(WeightTable& table) override {
    for (RmsNorm* norm : {&*norm_, &norm_1_, &norm_2_}) norm->list_tensors(table);
    mlp_->list_tensors(table);
    moe_->list_tensors(table);
  }
  void finish_loading(const Context& ctx) override {
    mlp_->finish_loading(ctx);
    moe_->finish_loading(ctx);
  }
  std::string norm_name() const override { return mlp_->norm_name(); }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const Value normed = ops.value("mlp_and_experts.normed", normed_);
    const Value experts = ops.value("mlp_and_experts.experts", experts_);
    norm_->append(ops, normed, x);
    mlp_->append(ops, hidden, normed);
    moe_->append(ops, experts, x);
    ops.call(
        prefix_ + "mlp_output_norm_1", {hidden}, {hidden},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          norm_heads(ctx, {.x = rows(hidden),
                           .width = spec_.hidden_size,
                           .weight = norm_1_.weight(),
                           .eps = spec_.rms_norm_eps,
                           .weight_offset = spec_.norm_offset()});
        },
        norm_1_.weight().num_bytes());
    ops.call(
        prefix_ + "mlp_output_norm_2", {hidden, experts}, {hidden},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          norm_add(ctx, {.hidden = rows(hidden),
                         .x = rows(experts),
                         .weight = norm_2_.weight(),
                         .eps = spec_.rms_norm_eps,
                         .weight_offset = spec_.norm_offset()});
        },
        norm_2_.weight().num_bytes());
  }

 private:
  const ModelSpec& spec_;
  std::string prefix_;
  Timeline phase_;
  RmsNorm norm_1_, norm_2_;      // norms of the output of the MLP, and of that of the experts
  std::optional<RmsNorm> norm_;  // norm before the MLP
  std::unique_ptr<Block> mlp_, moe_;
  MemoryPlan::Id normed_id_ = 0, experts_id_ = 0;
  int64_t max_tokens_ = 0;
  Tensor normed_, experts_;  // [T, H] each
};

REGISTER_BLOCK("mlp_and_experts", MlpAndExpertsBlock);

}  // namespace
}  // namespace cpmcu
