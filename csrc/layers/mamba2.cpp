// Mamba-2, the recurrent layers of Nemotron-H and Granite 4: "mamba2".
//
// Parameters: num_heads, head_dim, num_groups, state_size, conv_kernel (4), conv_bias (true), and
// the bounds min_step (0) and max_step (none) of a token's step. model_part.h sets `is_whole` for a
// rank of several that has all heads. Such a block has no part to sum.
#include "kernels/mamba2/mamba2.h"

#include "kernels/layer/gated_norm.h"
#include "kernels/short_conv/short_conv.h"
#include "layers/block.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

MambaShape shape_of(const Params& params) {
  params.check_known("a mamba2 block",
                     {"num_heads", "head_dim", "num_groups", "state_size", "conv_kernel",
                      "conv_bias", "min_step", "max_step", "is_whole"});
  const MambaShape shape{.num_heads = params.integer("num_heads", 0),
                         .head_dim = params.integer("head_dim", 0),
                         .num_groups = params.integer("num_groups", 0),
                         .state_size = params.integer("state_size", 0)};
  CHECK(shape.num_heads >= 1 && shape.num_groups >= 1 && shape.num_heads % shape.num_groups == 0,
        "a mamba2 block has {} heads in {} groups, expected a multiple of the groups",
        shape.num_heads, shape.num_groups);
  CHECK(shape.num_heads % 8 == 0 && shape.head_dim >= 8 && shape.head_dim % 8 == 0 &&
            shape.state_size >= 8 && shape.state_size % 8 == 0,
        "a mamba2 block has {} heads, a head_dim of {} and a state_size of {}, expected positive "
        "multiples of 8",
        shape.num_heads, shape.head_dim, shape.state_size);
  return shape;
}

class Mamba2Block : public Block {
 public:
  explicit Mamba2Block(const BlockConfig& config)
      : spec_(config.spec),
        shape_(shape_of(config.params)),
        kernel_size_(config.params.integer("conv_kernel", 4)),
        has_bias_(config.params.flag("conv_bias", true)),
        min_step_(config.params.number("min_step", 0)),
        max_step_(config.params.number("max_step", std::numeric_limits<float>::infinity())),
        is_whole_(config.params.flag("is_whole", false)),
        norm_name_(config.prefix + "input_layernorm"),
        module_(config.prefix + "mamba."),
        phase_(config.phase),
        adds_(config.adds) {
    CHECK(kernel_size_ >= 2 && kernel_size_ <= kMaxConvTaps,
          "a mamba2 block has a conv_kernel of {}, expected 2 to {}", kernel_size_, kMaxConvTaps);
    CHECK(min_step_ >= 0 && max_step_ >= min_step_,
          "a mamba2 block has steps from {} to {}, expected bounds of 0 or more", min_step_,
          max_step_);
    // The blocks of a draft do not learn which tokens a step accepted.
    CHECK(config.scope.empty(), "a draft model has mamba2 blocks, which only a target can");
    const auto linear = [&](const std::string& name, int64_t rows, int64_t columns) {
      const std::string module = module_ + name;
      return make_linear(spec_.linear_method_of(module),
                         {.parts = {{module, rows}},
                          .in_features = columns,
                          .dtype = spec_.dtype,
                          .options = spec_.linear_options_of(module),
                          .name = module});
    };
    in_ = linear("in_proj", projected_width(), spec_.hidden_size);
    out_ = linear("out_proj", spec_.hidden_size, shape_.inner());
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    CHECK(!limits.is_cuda() || ((shape_.state_size == 128 || shape_.state_size == 256) &&
                                shape_.head_dim >= 16 && shape_.head_dim <= 128),
          "a mamba2 block has a head_dim of {} and a state_size of {}, expected 16 to 128, and 128 "
          "or 256, on CUDA",
          shape_.head_dim, shape_.state_size);
    in_->plan(plan, limits);
    out_->plan(plan, limits);
    const int64_t bytes = size_of(spec_.dtype), channels = shape_.conv_columns();
    const int64_t heads = shape_.num_heads, window = kernel_size_ - 1;
    conv_id_ =
        plan.add(module_ + "conv1d", "weights", bytes * channels * (kernel_size_ + has_bias_));
    gates_id_ = plan.add(module_ + "gates", "weights", 3 * 4 * heads);
    norm_id_ = plan.add(module_ + "norm", "weights", bytes * shape_.inner());
    const auto slot = [&](const char* name, std::vector<int64_t> shape, DType dtype,
                          bool transient = false) {
      return state.add_slot({.name = module_ + name,
                             .shape = std::move(shape),
                             .dtype = dtype,
                             .transient = transient});
    };
    window_id_ = slot("window", {window, channels}, spec_.dtype);
    conv_folded_id_ = slot("conv_folded", {channels}, DType::kI32);
    conv_pending_id_ =
        slot("conv_pending", {limits.max_tree_size, channels}, spec_.dtype, /*transient=*/true);
    state_id_ = slot("state", {heads, shape_.head_dim, shape_.state_size}, DType::kF32);
    folded_id_ = slot("folded", {heads}, DType::kI32);
    pending_id_ = slot("pending", {heads, limits.max_tree_size, shape_.pending_width()},
                       spec_.dtype, /*transient=*/true);
    max_tokens_ = limits.max_tokens;
    in_buffer_id_ = plan.add_scratch("mamba.in", bytes * max_tokens_ * projected_width(),
                                     phase_ + 1, phase_ + 2);
    conv_buffer_id_ =
        plan.add_scratch("mamba.conv", bytes * max_tokens_ * channels, phase_ + 2, phase_ + 2);
    out_buffer_id_ =
        plan.add_scratch("mamba.out", bytes * max_tokens_ * shape_.inner(), phase_ + 2, phase_ + 3);
  }

  void bind(const Arena& arena, const ModelState& state) override {
    in_->bind(arena);
    out_->bind(arena);
    const int64_t channels = shape_.conv_columns(), heads = shape_.num_heads;
    const Tensor conv =
        arena.tensor(conv_id_, spec_.dtype, {kernel_size_ + int64_t{has_bias_}, channels});
    conv_weight_ = conv.rows(0, kernel_size_).view({channels, kernel_size_});
    if (has_bias_) conv_bias_ = conv.rows(kernel_size_, 1).view({channels});
    const Tensor gates = arena.tensor(gates_id_, DType::kF32, {3 * heads});
    a_log_ = gates.rows(0, heads);
    dt_bias_ = gates.rows(heads, heads);
    d_ = gates.rows(2 * heads, heads);
    norm_ = arena.tensor(norm_id_, spec_.dtype, {shape_.inner()});
    window_ = state.per_slot(window_id_);
    conv_folded_ = state.per_slot(conv_folded_id_);
    conv_pending_ = state.per_slot(conv_pending_id_);
    state_ = state.per_slot(state_id_);
    folded_ = state.per_slot(folded_id_);
    pending_ = state.per_slot(pending_id_);
    in_buffer_ = arena.tensor(in_buffer_id_, spec_.dtype, {max_tokens_, projected_width()});
    conv_buffer_ = arena.tensor(conv_buffer_id_, spec_.dtype, {max_tokens_, channels});
    out_buffer_ = arena.tensor(out_buffer_id_, spec_.dtype, {max_tokens_, shape_.inner()});
  }

  void list_tensors(WeightTable& table) override {
    in_->list_tensors(table);
    out_->list_tensors(table);
    table.add(module_ + "conv1d.weight",
              conv_weight_.view({shape_.conv_columns(), 1, kernel_size_}));
    if (has_bias_) table.add(module_ + "conv1d.bias", conv_bias_);
    table.add(module_ + "A_log", a_log_);
    table.add(module_ + "dt_bias", dt_bias_);
    table.add(module_ + "D", d_);
    table.add(module_ + "norm.weight", norm_);
    const int64_t inner = shape_.inner(), heads = shape_.num_heads;
    const int64_t of_groups = int64_t{shape_.num_groups} * shape_.state_size;
    table.set_sections(module_ + "in_proj", {inner, inner, of_groups, of_groups, heads});
    table.set_sections(module_ + "conv1d", {inner, of_groups, of_groups});
  }

  void finish_loading(const Context& ctx) override {
    in_->finish_loading(ctx);
    out_->finish_loading(ctx);
  }

  std::string norm_name() const override { return norm_name_; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const Value in = ops.value("mamba.in", in_buffer_);
    const Value conv = ops.value("mamba.conv", conv_buffer_);
    const Value out = ops.value("mamba.out", out_buffer_);
    ops.linear(module_ + "in_proj", *in_, in, x);
    ops.call(
        module_ + "conv1d", {in}, {conv},
        [=, this](const Context& ctx, const Step& step, const Rows& rows) {
          short_conv(ctx, {.out = rows(conv),
                           .x = rows(in),
                           .silu = true,
                           .first = shape_.inner(),
                           .weight = conv_weight_,
                           .bias = conv_bias_,
                           .window = window_,
                           .pending = conv_pending_,
                           .folded = conv_folded_,
                           .accepted = step.accepted,
                           .commits = step.phase == Phase::kPrefill,
                           .tokens = step.tokens});
        },
        conv_weight_.num_bytes());
    ops.call(module_ + "mamba2", {in, conv}, {out},
             [=, this](const Context& ctx, const Step& step, const Rows& rows) {
               mamba2(ctx, {.y = rows(out),
                            .xbc = rows(conv),
                            .dt = rows(in),
                            .first_dt = shape_.inner() + shape_.conv_columns(),
                            .shape = shape_,
                            .a_log = a_log_,
                            .dt_bias = dt_bias_,
                            .d = d_,
                            .min_step = min_step_,
                            .max_step = max_step_,
                            .state = state_,
                            .pending = pending_,
                            .folded = folded_,
                            .accepted = step.accepted,
                            .commits = step.phase == Phase::kPrefill,
                            .tokens = step.tokens});
             });
    ops.call(
        module_ + "norm", {in, out}, {out},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          gated_norm(ctx, {.out = rows(out),
                           .x = rows(out),
                           .gate = rows(in),
                           .weight = norm_,
                           .num_groups = shape_.num_groups,
                           .eps = spec_.rms_norm_eps});
        },
        norm_.num_bytes());
    if (!is_whole_) {
      ops.add_linear(module_ + "out_proj", *out_, hidden, out, spec_.residual_scale, adds_);
    } else if (adds_) {
      ops.accumulate(module_ + "out_proj", *out_, hidden, out, spec_.residual_scale);
    } else {
      ops.linear(module_ + "out_proj", *out_, hidden, out, spec_.residual_scale);
    }
  }

 private:
  // Columns of in_proj: the gate; x, B and C; dt.
  int64_t projected_width() const {
    return shape_.inner() + shape_.conv_columns() + shape_.num_heads;
  }

  const ModelSpec& spec_;
  const MambaShape shape_;
  int kernel_size_;
  bool has_bias_;
  float min_step_, max_step_;
  bool is_whole_;
  std::string norm_name_, module_;
  Timeline phase_;
  bool adds_;  // BlockConfig::adds
  std::unique_ptr<LinearMethod> in_, out_;
  MemoryPlan::Id conv_id_ = 0, gates_id_ = 0, norm_id_ = 0, in_buffer_id_ = 0, conv_buffer_id_ = 0,
                 out_buffer_id_ = 0;
  ModelState::SlotId window_id_, conv_folded_id_, conv_pending_id_, state_id_, folded_id_,
      pending_id_;
  int64_t max_tokens_ = 0;
  Tensor conv_weight_, conv_bias_, a_log_, dt_bias_, d_, norm_;
  Tensor window_, conv_folded_, conv_pending_;  // as in ShortConvParams
  Tensor state_, folded_, pending_;             // as in Mamba2Params
  Tensor in_buffer_, conv_buffer_, out_buffer_;
};

REGISTER_BLOCK("mamba2", Mamba2Block);

}  // namespace
}  // namespace cpmcu
