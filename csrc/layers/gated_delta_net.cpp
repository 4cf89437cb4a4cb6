// Gated delta net, the recurrent layers of hybrid models: "gated_delta_net".
//
// Parameters: num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_kernel (4), and
// fused_projections (Qwen3-Next's in_proj_qkvz and in_proj_ba).
#include "kernels/delta_net/gated_delta_net.h"

#include "kernels/gemm/gemm.h"
#include "layers/block.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

DeltaShape shape_of(const Params& params) {
  params.check_known("a gated_delta_net block",
                     {"num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim",
                      "conv_kernel", "fused_projections"});
  const DeltaShape shape{.num_key_heads = params.integer("num_key_heads", 0),
                         .num_value_heads = params.integer("num_value_heads", 0),
                         .key_dim = params.integer("key_head_dim", 0),
                         .value_dim = params.integer("value_head_dim", 0)};
  CHECK(shape.num_key_heads >= 1 && shape.num_value_heads >= shape.num_key_heads &&
            shape.num_value_heads % shape.num_key_heads == 0,
        "a gated_delta_net block has {} value heads and {} key heads, expected a multiple of the "
        "key heads",
        shape.num_value_heads, shape.num_key_heads);
  CHECK(shape.key_dim >= 8 && shape.key_dim % 8 == 0 && shape.value_dim >= 8 &&
            shape.value_dim % 8 == 0,
        "a gated_delta_net block has heads of {} and {} columns, expected positive multiples of 8",
        shape.key_dim, shape.value_dim);
  CHECK(params.integer("conv_kernel", kConvTaps) == kConvTaps,
        "a gated_delta_net block has conv_kernel {}, expected {}",
        params.integer("conv_kernel", kConvTaps), kConvTaps);
  return shape;
}

class GatedDeltaNetBlock : public Block {
 public:
  explicit GatedDeltaNetBlock(const BlockConfig& config)
      : spec_(config.spec),
        shape_(shape_of(config.params)),
        layout_(delta_layout(shape_, config.params.flag("fused_projections", false))),
        prefix_(config.prefix),
        phase_(config.phase) {
    CHECK(config.adds, "a gated_delta_net block has output_norm, expected no norm of its output");
    // The blocks of a draft do not learn which tokens a step accepted.
    CHECK(config.scope.empty(),
          "a draft model has gated_delta_net blocks, which only a target can");
    const std::string module = prefix_ + "linear_attn.";
    const bool fused = config.params.flag("fused_projections", false);
    const auto linear = [&](const std::string& name, std::vector<LinearPart> parts, int64_t in) {
      for (LinearPart& part : parts) part.name = module + part.name;
      return make_linear(spec_.linear_method_of(module + name),
                         {.parts = std::move(parts),
                          .in_features = in,
                          .dtype = spec_.dtype,
                          .options = spec_.linear_options_of(module + name),
                          .name = module + name});
    };
    const int64_t hidden = spec_.hidden_size, values = shape_.value_columns();
    const int64_t heads = shape_.num_value_heads;
    using Parts = std::vector<LinearPart>;
    qkvz_ = linear("in_proj_qkvz",
                   fused ? Parts{{"in_proj_qkvz", layout_.qkvz_row}}
                         : Parts{{"in_proj_qkv", shape_.conv_columns()}, {"in_proj_z", values}},
                   hidden);
    ba_ = linear("in_proj_ba",
                 fused ? Parts{{"in_proj_ba", 2 * heads}}
                       : Parts{{"in_proj_b", heads}, {"in_proj_a", heads}},
                 hidden);
    ba_is_dense_ = spec_.linear_method_of(module + "in_proj_ba") == "dense";
    out_ = linear("out_proj", {{"out_proj", hidden}}, values);
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    CHECK(!limits.is_cuda() || (shape_.key_dim == 128 && shape_.value_dim == 128),
          "a gated_delta_net block has heads of {} and {} columns, expected 128 on CUDA",
          shape_.key_dim, shape_.value_dim);
    qkvz_->plan(plan, limits);
    ba_->plan(plan, limits);
    out_->plan(plan, limits);
    const std::string module = prefix_ + "linear_attn.";
    const int64_t bytes = size_of(spec_.dtype), heads = shape_.num_value_heads;
    conv_id_ = plan.add(module + "conv1d", "weights", bytes * shape_.conv_columns() * kConvTaps);
    gates_id_ = plan.add(module + "gates", "weights", 2 * 4 * heads);
    norm_id_ = plan.add(module + "norm", "weights", bytes * shape_.value_dim);
    state_id_ = state.add_slot({.name = module + "state",
                                .shape = {heads, shape_.value_dim / kDeltaTileWidth,
                                          int64_t{shape_.key_dim} * kDeltaTileWidth}});
    window_id_ = state.add_slot({.name = module + "window",
                                 .shape = {heads, kConvTaps - 1, shape_.raw_width()},
                                 .dtype = spec_.dtype});
    folded_id_ =
        state.add_slot({.name = module + "folded", .shape = {heads}, .dtype = DType::kI32});
    pending_id_ = state.add_slot({.name = module + "pending",
                                  .shape = {heads, limits.max_tree_size, shape_.pending_width()},
                                  .dtype = spec_.dtype,
                                  .transient = true});
    max_tokens_ = limits.max_tokens;
    qkvz_buffer_id_ = plan.add_scratch("delta_net.qkvz", bytes * max_tokens_ * layout_.qkvz_row,
                                       phase_ + 1, phase_ + 2);
    ba_buffer_id_ = plan.add_scratch("delta_net.ba", bytes * max_tokens_ * layout_.ba_row,
                                     phase_ + 1, phase_ + 2);
    out_buffer_id_ = plan.add_scratch("delta_net.out", bytes * max_tokens_ * shape_.value_columns(),
                                      phase_ + 2, phase_ + 3);
  }

  void bind(const Arena& arena, const ModelState& state) override {
    qkvz_->bind(arena);
    ba_->bind(arena);
    out_->bind(arena);
    const int64_t heads = shape_.num_value_heads;
    conv_ = arena.tensor(conv_id_, spec_.dtype, {shape_.conv_columns(), kConvTaps});
    const Tensor gates = arena.tensor(gates_id_, DType::kF32, {2 * heads});
    a_log_ = gates.rows(0, heads);
    dt_bias_ = gates.rows(heads, heads);
    norm_ = arena.tensor(norm_id_, spec_.dtype, {shape_.value_dim});
    state_ = state.per_slot(state_id_);
    window_ = state.per_slot(window_id_);
    folded_ = state.per_slot(folded_id_);
    pending_ = state.per_slot(pending_id_);
    qkvz_buffer_ = arena.tensor(qkvz_buffer_id_, spec_.dtype, {max_tokens_, layout_.qkvz_row});
    ba_buffer_ = arena.tensor(ba_buffer_id_, spec_.dtype, {max_tokens_, layout_.ba_row});
    out_buffer_ = arena.tensor(out_buffer_id_, spec_.dtype, {max_tokens_, shape_.value_columns()});
  }

  void list_tensors(WeightTable& table) override {
    qkvz_->list_tensors(table);
    ba_->list_tensors(table);
    out_->list_tensors(table);
    const std::string module = prefix_ + "linear_attn.";
    table.add(module + "conv1d.weight", conv_.view({shape_.conv_columns(), 1, kConvTaps}));
    table.add(module + "A_log", a_log_);
    table.add(module + "dt_bias", dt_bias_);
    table.add(module + "norm.weight", norm_);
    const int64_t keys = int64_t{shape_.num_key_heads} * shape_.key_dim;
    for (const char* name : {"conv1d", "in_proj_qkv"}) {
      table.set_sections(module + name, {keys, keys, shape_.value_columns()});
    }
  }

  void finish_loading(const Context& ctx) override {
    qkvz_->finish_loading(ctx);
    ba_->finish_loading(ctx);
    out_->finish_loading(ctx);
  }

  std::string norm_name() const override { return prefix_ + "input_layernorm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const std::string module = prefix_ + "linear_attn.";
    const Value qkvz = ops.value("delta_net.qkvz", qkvz_buffer_);
    const Value ba = ops.value("delta_net.ba", ba_buffer_);
    const Value out = ops.value("delta_net.out", out_buffer_);
    append_projections(ops, qkvz, ba, x);
    ops.call(module + "gated_delta_net", {qkvz, ba}, {out},
             [=, this](const Context& ctx, const Step& step, const Rows& rows) {
               gated_delta_net(ctx, {.out = rows(out),
                                     .qkvz = rows(qkvz),
                                     .ba = rows(ba),
                                     .shape = shape_,
                                     .layout = layout_,
                                     .conv_weight = conv_,
                                     .a_log = a_log_,
                                     .dt_bias = dt_bias_,
                                     .norm_weight = norm_,
                                     .norm_eps = spec_.rms_norm_eps,
                                     .state = state_,
                                     .window = window_,
                                     .pending = pending_,
                                     .folded = folded_,
                                     .accepted = step.accepted,
                                     .accepts_all = step.accepts_all,
                                     .commits = step.phase == Phase::kPrefill,
                                     .tokens = step.tokens});
             });
    ops.add_linear(module + "out_proj", *out_, hidden, out, spec_.residual_scale, /*adds=*/true);
  }

 private:
  // Two GEMMs read the normed x. In a decode step the small GEMM computes the norm again. So the
  // large GEMM can be fused with the norm and the GEMMs before it.
  void append_projections(OpList& ops, const Value& qkvz, const Value& ba, const Value& x) const {
    const std::string module = prefix_ + "linear_attn.";
    const NormOp* const before = ops.norm_of(x);
    if (ops.phase() == Phase::kPrefill || !ba_is_dense_ || before == nullptr) {
      ops.linear(module + "in_proj_ba", *ba_, ba, x);
      return ops.linear(module + "in_proj_qkvz", *qkvz_, qkvz, x);
    }
    const NormOp norm = *before;
    ops.linear(module + "in_proj_qkvz", *qkvz_, qkvz, x);
    ops.call(
        module + "in_proj_ba", {norm.x}, {ba},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          normed_gemm(ctx, {.y = rows(ba),
                            .x = rows(norm.x),
                            .w = ba_->dense_weight(),
                            .norm_weight = norm.params.weight,
                            .norm_eps = norm.params.eps,
                            .norm_offset = norm.params.weight_offset});
        },
        ba_->weight_bytes());
  }

  const ModelSpec& spec_;
  const DeltaShape shape_;
  const DeltaLayout layout_;
  std::string prefix_;
  Timeline phase_;
  bool ba_is_dense_ = false;
  std::unique_ptr<LinearMethod> qkvz_, ba_, out_;
  MemoryPlan::Id conv_id_ = 0, gates_id_ = 0, norm_id_ = 0, qkvz_buffer_id_ = 0, ba_buffer_id_ = 0,
                 out_buffer_id_ = 0;
  ModelState::SlotId state_id_, window_id_, folded_id_, pending_id_;
  int64_t max_tokens_ = 0;
  Tensor conv_, a_log_, dt_bias_, norm_;
  Tensor state_, window_, folded_, pending_;  // as in GatedDeltaNetParams
  Tensor qkvz_buffer_, ba_buffer_, out_buffer_;
};

REGISTER_BLOCK("gated_delta_net", GatedDeltaNetBlock);

}  // namespace
}  // namespace cpmcu
