// Mixture of experts: "moe". A router chooses top_k experts for each token. Each is an MLP.
//
//   y = sum over the chosen experts of weight * down(silu(gate(x)) * up(x)) + sigmoid(g x) *
//   shared(x)
//
// The shared expert is optional. The router and g are one GEMM in float32. Other routers
// (router.h), activations and biases are launches of their own. If shared_expert_gate is false, the
// shared expert has the factor 1 and the activation of the others.
//
// With a latent_size the chosen experts have that width instead of the hidden size: they read
// fc1_latent_proj(x), and fc2_latent_proj of their sum is added. Router and shared expert read x.
#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_router.h"
#include "layers/block.h"
#include "layers/gating.h"
#include "layers/router.h"
#include "linear/experts.h"

namespace cpmcu {
namespace {

// A larger step runs in groups of tokens, so that scratch does not grow with it.
constexpr int64_t kGroupTokens = 2048;

struct MoeShape {
  int num_experts, top_k, width, shared_width;
  int latent;        // width of the experts' input and output; 0: hidden_size
  bool shared_gate;  // the shared expert's output is multiplied by sigmoid(g)
  bool renormalise;
  bool expert_bias;  // gate, up and down have biases
  // The rows of gate and up alternate in one matrix, gate_up_proj; so do the entries of its bias.
  bool alternating_gate_up;
  Gating activation;

  MoeShape(const ModelSpec& spec, const Params& params)
      : num_experts(params.integer("num_experts", 0)),
        top_k(params.integer("top_k", 0)),
        width(params.integer("intermediate_size", spec.intermediate_size)),
        shared_width(params.integer("shared_intermediate_size", 0)),
        latent(params.integer("latent_size", 0)),
        shared_gate(shared_width > 0 && params.flag("shared_expert_gate", true)),
        renormalise(params.flag("norm_topk_prob", true)),
        expert_bias(params.flag("expert_bias", false)),
        alternating_gate_up(params.flag("alternating_gate_up", false)),
        activation(gating_of(params)) {
    params.check_known(
        "a moe block",
        {"num_experts",         "top_k",          "intermediate_size", "shared_intermediate_size",
         "shared_expert_gate",  "norm_topk_prob", "expert_bias",       "router_bias",
         "alternating_gate_up", "activation",     "swiglu_alpha",      "swiglu_limit",
         "router_norm",         "scoring",        "correction_bias",   "norm_epsilon",
         "routing_factor",      "expert_scale",   "num_expert_groups", "top_k_groups",
         "latent_size"});
    check_routing({.num_experts = num_experts, .top_k = top_k});
    CHECK(width >= 8 && width % 8 == 0,
          "a moe block has an intermediate_size of {}, expected a positive multiple of 8", width);
    CHECK(shared_width >= 0 && shared_width % 8 == 0,
          "a moe block has a shared_intermediate_size of {}, expected 0 or a multiple of 8",
          shared_width);
    CHECK(latent >= 0 && latent % 8 == 0 && (latent == 0 || !shared_gate),
          "a moe block has a latent_size of {}, expected 0, or a multiple of 8 and no gate of a "
          "shared expert",
          latent);
    CHECK(
        !shared_gate || is_plain(),
        "a moe block has a shared expert with a gate and a bias or an activation other than silu, "
        "expected one of them");
    CHECK(activation.is_gated() || !(expert_bias || alternating_gate_up),
          "a moe block has the activation relu2 and biases or alternating_gate_up, expected "
          "neither");
  }
  // Whether the GEMM of gate and up computes silu(gate) * up itself.
  bool is_plain() const { return activation.is_silu() && !expert_bias && !alternating_gate_up; }

  // Whether expert_gemm can compute the activation with its bias.
  bool is_swiglu() const {
    return activation.kind == Activation::kClampedSwiglu && expert_bias && alternating_gate_up;
  }

  int router_rows() const { return num_experts + (shared_gate ? 1 : 0); }
};

class MoeBlock : public Block {
 public:
  explicit MoeBlock(const BlockConfig& config)
      : spec_(config.spec),
        shape_(spec_, config.params),
        mlp_(config.prefix + "mlp."),
        fc1_(mlp_ + "fc1_latent_proj"),
        fc2_(mlp_ + "fc2_latent_proj"),
        router_rule_(spec_, config.params, mlp_),
        norm_name_(config.prefix + "post_attention_layernorm"),
        phase_(config.phase),
        adds_(config.adds) {
    CHECK(!shape_.shared_gate || router_rule_.is_plain(),
          "a moe block has a shared expert with a gate and another router than a softmax, expected "
          "one of them");
    routing_.num_experts = shape_.num_experts;
    routing_.top_k = shape_.top_k;
    const int hidden = spec_.hidden_size, experts_width = experts_columns();
    using Parts = std::vector<LinearPart>;
    // The matrices of an expert before its activation.
    const auto ups = [&](const std::string& prefix, int64_t width) {
      Parts parts{{prefix + "up_proj", width}};
      if (shape_.activation.is_gated()) parts.insert(parts.begin(), {prefix + "gate_proj", width});
      return parts;
    };
    const std::string up = shape_.activation.is_gated() ? "gate_up_proj" : "up_proj";
    gate_up_ =
        experts({.parts = shape_.alternating_gate_up ? Parts{{"gate_up_proj", 2 * shape_.width}}
                                                     : ups("", shape_.width),
                 .in_features = experts_width,
                 .name = up,
                 .gated = shape_.is_plain()});
    down_ = experts({.parts = {{"down_proj", experts_width}}, .in_features = shape_.width});
    if (shape_.latent > 0) {
      to_latent_ = linear(fc1_, {.parts = {{fc1_, experts_width}}, .in_features = hidden});
      from_latent_ = linear(fc2_, {.parts = {{fc2_, hidden}}, .in_features = experts_width});
    }
    if (shape_.shared_width == 0) return;
    const std::string shared = mlp_ + "shared_expert.";
    shared_up_name_ = shared + up;
    shared_gate_up_ = linear(shared_up_name_, {.parts = ups(shared, shape_.shared_width),
                                               .in_features = hidden,
                                               .name = shared_up_name_,
                                               .gated = shape_.activation.is_silu()});
    shared_down_ = linear(shared + "down_proj", {.parts = {{shared + "down_proj", hidden}},
                                                 .in_features = shape_.shared_width});
  }

  void plan(MemoryPlan& plan, ModelState&, const StepLimits& limits) override {
    max_tokens_ = std::min<int64_t>(limits.max_tokens, kGroupTokens);
    const int64_t bytes = size_of(spec_.dtype), hidden = spec_.hidden_size;
    const int64_t num_pairs = max_tokens_ * shape_.top_k;
    gate_up_->plan(plan);
    down_->plan(plan);
    router_id_ = plan.add(mlp_ + "gate", "weights", bytes * shape_.router_rows() * hidden);
    router_bytes_ = limits.is_cuda() ? moe_router_bytes(max_tokens_, shape_.router_rows()) : 0;
    memory_id_ = plan.add_scratch("moe.router", router_bytes_, 0, kLoad);
    logits_id_ = plan.add_scratch("moe.logits", 4 * max_tokens_ * shape_.router_rows(), phase_ + 1,
                                  phase_ + 3);
    routing_id_ = plan.add_scratch("moe.routing", carved_bytes([&](Carver& carver) {
                                     Routing(routing_).layout(carver, max_tokens_);
                                   }),
                                   phase_ + 1, phase_ + 3);
    act_id_ = plan.add_scratch("moe.act", bytes * num_pairs * shape_.width, phase_ + 1, phase_ + 3);
    if (!shape_.is_plain()) {
      both_id_ = plan.add_scratch("moe.gate_up",
                                  bytes * num_pairs * shape_.activation.columns(shape_.width),
                                  phase_ + 1, phase_ + 3);
    }
    if (shape_.expert_bias) {
      gate_up_bias_id_ = plan.add(mlp_ + "experts.gate_up_proj_bias", "weights",
                                  2 * bytes * shape_.num_experts * shape_.width);
      down_bias_id_ = plan.add(mlp_ + "experts.down_proj_bias", "weights",
                               bytes * shape_.num_experts * experts_columns());
    }
    router_rule_.plan(plan, max_tokens_, phase_);
    out_id_ =
        plan.add_scratch("moe.out", 4 * num_pairs * experts_columns(), phase_ + 1, phase_ + 3);
    if (shape_.latent > 0) {
      to_latent_->plan(plan, limits);
      from_latent_->plan(plan, limits);
      const int64_t size = bytes * max_tokens_ * shape_.latent;
      latent_x_id_ = plan.add_scratch("moe.latent_x", size, phase_ + 1, phase_ + 3);
      latent_sum_id_ = plan.add_scratch("moe.latent_sum", size, phase_ + 1, phase_ + 3);
    }
    if (shared_down_ == nullptr) return;
    shared_gate_up_->plan(plan, limits);
    shared_down_->plan(plan, limits);
    shared_act_id_ = plan.add_scratch("moe.shared_act", bytes * max_tokens_ * shape_.shared_width,
                                      phase_ + 1, phase_ + 3);
    shared_both_id_ = plan.add_scratch(
        "moe.shared_gate_up", bytes * max_tokens_ * shape_.activation.columns(shape_.shared_width),
        phase_ + 1, phase_ + 3);
    if (!shape_.shared_gate) return;
    shared_out_id_ =
        plan.add_scratch("moe.shared_out", 4 * max_tokens_ * hidden, phase_ + 1, phase_ + 3);
  }

  void bind(const Arena& arena, const ModelState&) override {
    const int64_t hidden = spec_.hidden_size, num_pairs = max_tokens_ * shape_.top_k;
    gate_up_->bind(arena);
    down_->bind(arena);
    router_ = arena.tensor(router_id_, spec_.dtype, {shape_.router_rows(), hidden});
    memory_ = arena.tensor(memory_id_, DType::kU8, {router_bytes_});
    logits_ = arena.tensor(logits_id_, DType::kF32, {max_tokens_, shape_.router_rows()});
    Carver carver(arena.array<char>(routing_id_));
    routing_.layout(carver, max_tokens_);
    act_ = arena.tensor(act_id_, spec_.dtype, {num_pairs, shape_.width});
    out_ = arena.tensor(out_id_, DType::kF32, {num_pairs, experts_columns()});
    if (shape_.latent > 0) {
      to_latent_->bind(arena);
      from_latent_->bind(arena);
      latent_x_ = arena.tensor(latent_x_id_, spec_.dtype, {max_tokens_, shape_.latent});
      latent_sum_ = arena.tensor(latent_sum_id_, spec_.dtype, {max_tokens_, shape_.latent});
    }
    const int64_t experts = shape_.num_experts;
    if (!shape_.is_plain()) {
      both_ =
          arena.tensor(both_id_, spec_.dtype, {num_pairs, shape_.activation.columns(shape_.width)});
    }
    if (shape_.expert_bias) {
      gate_up_bias_ = arena.tensor(gate_up_bias_id_, spec_.dtype, {experts, 2 * shape_.width});
      down_bias_ = arena.tensor(down_bias_id_, spec_.dtype, {experts, experts_columns()});
    }
    router_rule_.bind(arena);
    if (shared_down_ == nullptr) return;
    shared_gate_up_->bind(arena);
    shared_down_->bind(arena);
    shared_act_ = arena.tensor(shared_act_id_, spec_.dtype, {max_tokens_, shape_.shared_width});
    shared_both_ = arena.tensor(shared_both_id_, spec_.dtype,
                                {max_tokens_, shape_.activation.columns(shape_.shared_width)});
    if (!shape_.shared_gate) return;
    shared_out_ = arena.tensor(shared_out_id_, DType::kF32, {max_tokens_, hidden});
  }

  void list_tensors(WeightTable& table) override {
    table.add(mlp_ + "gate.weight", router_.rows(0, shape_.num_experts));
    gate_up_->list_tensors(table);
    down_->list_tensors(table);
    if (shape_.expert_bias) {
      table.add(mlp_ + "experts.gate_up_proj_bias", gate_up_bias_);
      table.add(mlp_ + "experts.down_proj_bias", down_bias_);
    }
    router_rule_.list_tensors(table);
    if (shape_.latent > 0) {
      to_latent_->list_tensors(table);
      from_latent_->list_tensors(table);
    }
    if (shared_down_ == nullptr) return;
    if (shape_.shared_gate) {
      table.add(mlp_ + "shared_expert_gate.weight", router_.rows(shape_.num_experts, 1));
    }
    shared_gate_up_->list_tensors(table);
    shared_down_->list_tensors(table);
  }

  void finish_loading(const Context& ctx) override {
    fill_bytes(ctx.device, memory_.data(), 0, router_bytes_, ctx.stream);
    gate_up_->finish_loading(ctx);
    down_->finish_loading(ctx);
    if (shape_.latent > 0) {
      to_latent_->finish_loading(ctx);
      from_latent_->finish_loading(ctx);
    }
    if (shared_down_ == nullptr) return;
    shared_gate_up_->finish_loading(ctx);
    shared_down_->finish_loading(ctx);
  }

  std::string norm_name() const override { return norm_name_; }

  void append(OpList& ops, const Value& hidden, const Value& input) const override {
    ops.begin_groups(kGroupTokens);
    append_router(ops, input);
    const Value x =
        router_rule_.norms_input() ? router_rule_.append_experts_norm(ops, input) : input;
    // Each rank has some columns of every expert. It adds its parts of the chosen experts' outputs.
    const bool divided = ops.sums_over_ranks(), adds = adds_ && !divided;
    const bool latent = shape_.latent > 0;
    const Value out = divided ? ops.part() : hidden;
    const Value sum_of_experts = latent ? ops.value("moe.latent_sum", latent_sum_) : out;
    const bool adds_experts = adds && !latent;
    if (!adds_experts) {  // moe_combine adds to its result
      ops.call(mlp_ + "zero", {}, {sum_of_experts},
               [=](const Context& ctx, const Step&, const Rows& rows) {
                 const Tensor all = rows(sum_of_experts);
                 fill_bytes(ctx.device, all.data(), 0, all.num_bytes(), ctx.stream);
               });
    }
    MoeCombineParams sum{.hidden = {},
                         .y = out_,
                         .routing = routing_,
                         .bias = down_adds_bias(ops) ? Tensor() : down_bias_,
                         .scale = latent ? 1 : spec_.residual_scale};
    const std::string shared_down = mlp_ + "shared_expert.down_proj";
    Value shared_act;
    if (shared_down_ != nullptr) shared_act = append_shared_up(ops, x);
    if (shape_.shared_gate) {
      ops.linear(shared_down, *shared_down_, ops.value("moe.shared_out", shared_out_), shared_act);
      sum.shared = shared_out_;
      sum.shared_gate = logits_;
      sum.gate_column = shape_.num_experts;
    }
    Value experts_x = x;
    if (latent) {
      experts_x = ops.value("moe.latent_x", latent_x_);
      ops.linear(fc1_, *to_latent_, experts_x, x);
    }
    append_experts(ops, experts_x);
    ops.combine(mlp_ + "experts.combine", sum_of_experts, sum, adds_experts);
    if (latent && adds) {
      ops.accumulate(fc2_, *from_latent_, out, sum_of_experts, spec_.residual_scale);
    } else if (latent) {
      ops.linear(fc2_, *from_latent_, out, sum_of_experts, spec_.residual_scale);
    }
    if (shared_down_ != nullptr && !shape_.shared_gate) {
      ops.accumulate(shared_down, *shared_down_, out, shared_act, spec_.residual_scale);
    }
    ops.end_groups();
    if (divided) ops.add_parts(hidden, adds_);
  }

 private:
  // The width of what the experts read and write.
  int experts_columns() const { return shape_.latent > 0 ? shape_.latent : spec_.hidden_size; }

  // The experts' part of the checkpoint is that of expert 0: all experts of a layer are alike.
  std::unique_ptr<ExpertLinear> experts(LinearConfig expert) const {
    expert.dtype = spec_.dtype;
    ExpertsConfig config{
        .prefix = mlp_ + "experts.", .expert = expert, .num_experts = shape_.num_experts};
    const std::string first = config.prefix_of(0) + expert.stacked_name();
    config.expert.options = spec_.linear_options_of(first);
    return make_experts(spec_.linear_method_of(first), config);
  }

  std::unique_ptr<LinearMethod> linear(const std::string& module, LinearConfig config) const {
    config.dtype = spec_.dtype;
    config.options = spec_.linear_options_of(module);
    return make_linear(spec_.linear_method_of(module), config);
  }

  // The sums have the same order in every phase, so a token's experts do not depend on the phase.
  void append_router(OpList& ops, const Value& x) const {
    if (!router_rule_.is_one_launch()) {
      return ops.call(
          mlp_ + "gate", {x}, {},
          [=, this](const Context& ctx, const Step&, const Rows& rows) {
            router_rule_.route(ctx, logits_.rows(0, rows.count), rows(x), router_, routing_);
          },
          router_.num_bytes());
    }
    ops.router(mlp_ + "gate", x,
               {.logits = logits_,
                .x = {},
                .w = router_,
                .bias = router_rule_.bias(),
                .renormalise = shape_.renormalise,
                .routing = routing_,
                .memory = memory_});
  }

  // Appends the shared expert's activation of gate and up, and returns it.
  Value append_shared_up(OpList& ops, const Value& x) const {
    const Value act = ops.value("moe.shared_act", shared_act_);
    const Value both = ops.value("moe.shared_gate_up", shared_both_);
    if (shape_.activation.is_silu()) {
      ops.gated(shared_up_name_, *shared_gate_up_, act, both, x);
      return act;
    }
    ops.linear(shared_up_name_, *shared_gate_up_, both, x);
    ops.call(mlp_ + "shared_expert.activation", {both}, {act},
             [=, this](const Context& ctx, const Step&, const Rows& rows) {
               gated_activation(ctx, {.out = rows(act),
                                      .x = rows(both),
                                      .kind = shape_.activation.kind,
                                      .alpha = shape_.activation.alpha,
                                      .limit = shape_.activation.limit});
             });
    return act;
  }

  // Whether the GEMM of down adds its bias. Else moe_combine does, of several ranks only the first.
  static bool down_adds_bias(const OpList& ops) {
    return ops.phase() == Phase::kDecode && !ops.sums_over_ranks();
  }

  // out_ = down of the experts of each pair.
  void append_experts(OpList& ops, const Value& x) const {
    const bool sorts = ops.phase() == Phase::kPrefill, adds_bias = down_adds_bias(ops);
    ops.call(
        mlp_ + "experts", {x}, {},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          sorts&& has_sorted_gemm(ctx) ? multiply_sorted(ctx, rows(x))
                                       : multiply(ctx, rows(x), adds_bias);
        },
        shape_.top_k * (gate_up_->expert_bytes() + down_->expert_bytes()));
  }

  // act = activation of gate and up of each pair; `order`: the pair of each row, null: row r.
  void activate(const Context& ctx, const Tensor& act, const Tensor& both, const int* order) const {
    gated_activation(ctx, {.out = act,
                           .x = both,
                           .kind = shape_.activation.kind,
                           .alpha = shape_.activation.alpha,
                           .limit = shape_.activation.limit,
                           .alternates = shape_.alternating_gate_up,
                           .bias = gate_up_bias_,
                           .index = shape_.expert_bias ? routing_.experts : nullptr,
                           .order = shape_.expert_bias ? order : nullptr});
  }

  // `adds_bias`: the results of down get the bias.
  void multiply(const Context& ctx, const Tensor& x, bool adds_bias) const {
    const int64_t num_pairs = x.size(0) * shape_.top_k;
    const Tensor act = act_.rows(0, num_pairs), out = out_.rows(0, num_pairs);
    const bool fuses = shape_.is_plain() || shape_.is_swiglu();
    const Tensor both = fuses ? act : both_.rows(0, num_pairs);
    gate_up_->forward(ctx, {.y = both,
                            .x = x,
                            .pairs_per_x = shape_.top_k,
                            .routing = routing_,
                            .bias = shape_.is_swiglu() ? gate_up_bias_ : Tensor(),
                            .swiglu_alpha = shape_.activation.alpha,
                            .swiglu_limit = shape_.is_swiglu() ? shape_.activation.limit : 0});
    if (!fuses) activate(ctx, act, both, nullptr);
    down_->forward(ctx, {.y = out,
                         .x = act,
                         .routing = routing_,
                         .routing_is_complete = true,
                         .bias = adds_bias ? down_bias_ : Tensor()});
  }

  void multiply_sorted(const Context& ctx, const Tensor& x) const {
    const int64_t num_pairs = x.size(0) * shape_.top_k;
    const Tensor act = act_.rows(0, num_pairs), out = out_.rows(0, num_pairs);
    const bool plain = shape_.is_plain();
    const Tensor both = plain ? act : both_.rows(0, num_pairs);
    // The memory of `out` is free until the down projection writes it.
    const Tensor sorted(out.data(), x.dtype(), {num_pairs, x.size(1)});
    gather_pairs(ctx, {.sorted = sorted, .x = x, .routing = routing_});
    gate_up_->forward_sorted(ctx, {.y = both, .x = sorted, .routing = routing_, .sorted_y = true});
    if (!plain) activate(ctx, act, both, routing_.pairs);
    down_->forward_sorted(ctx, {.y = out, .x = act, .routing = routing_});
  }

  const ModelSpec& spec_;
  const MoeShape shape_;
  std::string mlp_, fc1_, fc2_;
  Router router_rule_;
  std::string norm_name_;
  Timeline phase_;
  bool adds_;  // BlockConfig::adds
  std::unique_ptr<ExpertLinear> gate_up_, down_;
  std::string shared_up_name_;
  std::unique_ptr<LinearMethod> shared_gate_up_, shared_down_;  // null: there is no shared expert
  std::unique_ptr<LinearMethod> to_latent_, from_latent_;       // null: latent_size is 0
  Routing routing_;
  MemoryPlan::Id router_id_ = 0, logits_id_ = 0, routing_id_ = 0, act_id_ = 0, out_id_ = 0,
                 shared_act_id_ = 0, shared_both_id_ = 0, shared_out_id_ = 0, memory_id_ = 0,
                 both_id_ = 0, gate_up_bias_id_ = 0, down_bias_id_ = 0, latent_x_id_ = 0,
                 latent_sum_id_ = 0;
  int64_t max_tokens_ = 0;
  int64_t router_bytes_ = 0;
  Tensor memory_;                    // `memory` of MoeRouterParams
  Tensor router_;                    // [E, H]; with a shared expert, its gate is one more row
  Tensor gate_up_bias_, down_bias_;  // [E, 2 I], [E, H or latent]
  Tensor both_;                      // [P, 2 I]: results of gate and up, unless is_plain
  Tensor latent_x_, latent_sum_;     // [T, latent] each
  Tensor logits_, act_, out_, shared_act_, shared_both_, shared_out_;
};

REGISTER_BLOCK("moe", MoeBlock);

}  // namespace
}  // namespace cpmcu
