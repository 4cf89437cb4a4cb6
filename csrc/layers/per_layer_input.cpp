// Embeddings of each layer (Gemma 4 E2B and E4B): a table has a row of P elements for each layer
// and token.
//
//   per_layer_embedding  before the first layer. For all layers at once, from the embedding h:
//                        e = (√P table[id] + norm(projection(h) / √H)) / √2
//   per_layer_input      in each layer: y = projection(gelu(gate(h)) * e[layer])
//
// Parameter: `width`, P. The first block does not change the residual stream. Both blocks read it
// without a norm (input_norm false); the second has output_norm. The table is in device memory.
#include <cmath>

#include "kernels/layer/embedding.h"
#include "kernels/layer/gated_activation.h"
#include "kernels/layer/norm_add.h"
#include "layers/block.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

int width_of(const Params& params) {
  params.check_known("a per_layer_embedding or per_layer_input block", {"width", "layer"});
  const int width = params.integer("width", 0);
  CHECK(width >= 8 && width % 8 == 0,
        "a per_layer_input block has the width {}, expected a "
        "positive multiple of 8",
        width);
  return width;
}

// e [T, layers * P], which the layers of a step share.
struct PerLayerInputs {
  int64_t columns = 0, max_tokens = 0;
  MemoryPlan::Id id = 0;
  Tensor rows{};

  void plan(MemoryPlan& plan, const std::string& scope, DType dtype, int64_t tokens) {
    max_tokens = tokens;
    id = plan.add_scratch(scope + "per_layer_inputs", tokens * columns * size_of(dtype), 0, kLoad);
  }
  void bind(const Arena& arena, DType dtype) {
    rows = arena.tensor(id, dtype, {max_tokens, columns});
  }
};

class PerLayerEmbeddingBlock : public Block {
 public:
  explicit PerLayerEmbeddingBlock(const BlockConfig& config)
      : spec_(config.spec),
        width_(width_of(config.params)),
        prefix_(config.prefix + "per_layer_embedding."),
        scope_(config.scope),
        phase_(config.phase),
        inputs_{.columns = int64_t{spec_.num_hidden_layers} * width_},
        norm_(spec_, prefix_ + "norm", width_) {
    CHECK(config.adds, "a per_layer_embedding block has output_norm, expected none");
    projection_ = make_linear(spec_.linear_method_of(prefix_ + "projection"),
                              {.parts = {{prefix_ + "projection", inputs_.columns}},
                               .in_features = spec_.hidden_size,
                               .dtype = spec_.dtype,
                               .options = spec_.linear_options_of(prefix_ + "projection")});
  }

  void plan(MemoryPlan& plan, ModelState&, const StepLimits& limits) override {
    const int64_t row = inputs_.columns * size_of(spec_.dtype);
    table_id_ = plan.add(prefix_ + "table", "weights", spec_.vocab_size * row);
    projection_->plan(plan, limits);
    norm_.plan(plan);
    inputs_.plan(plan, scope_, spec_.dtype, limits.max_tokens);
    projected_id_ = plan.add_scratch("per_layer_embedding.projected", limits.max_tokens * row,
                                     phase_ + 1, phase_ + 3);
  }
  void bind(const Arena& arena, const ModelState&) override {
    table_ = arena.tensor(table_id_, spec_.dtype, {spec_.vocab_size, inputs_.columns});
    projection_->bind(arena);
    norm_.bind(arena);
    inputs_.bind(arena, spec_.dtype);
    projected_ = arena.tensor(projected_id_, spec_.dtype, {inputs_.max_tokens, inputs_.columns});
  }
  void list_tensors(WeightTable& table) override {
    table.add(prefix_ + "table.weight", table_);
    projection_->list_tensors(table);
    norm_.list_tensors(table);
  }
  void finish_loading(const Context& ctx) override { projection_->finish_loading(ctx); }
  std::string norm_name() const override { return prefix_ + "input_norm"; }

  void append(OpList& ops, const Value&, const Value& x) const override {
    const Value inputs = ops.value("per_layer_inputs", inputs_.rows);
    const Value projected = ops.value("per_layer_embedding.projected", projected_);
    ops.call(prefix_ + "table", {}, {inputs},
             [=, this](const Context& ctx, const Step& step, const Rows& rows) {
               embedding(ctx, {.out = rows(inputs),
                               .table = table_,
                               .ids = step.ids,
                               .scale = std::sqrt(static_cast<float>(width_))});
             });
    ops.linear(prefix_ + "projection", *projection_, projected, x,
               1 / std::sqrt(static_cast<float>(spec_.hidden_size)));
    ops.call(
        prefix_ + "norm", {inputs, projected}, {inputs},
        [=, this](const Context& ctx, const Step&, const Rows& rows) {
          const int64_t count = rows.count * spec_.num_hidden_layers;
          norm_add(ctx, {.hidden = rows(inputs).view({count, width_}),
                         .x = rows(projected).view({count, width_}),
                         .weight = norm_.weight(),
                         .eps = spec_.rms_norm_eps,
                         .weight_offset = spec_.norm_offset(),
                         .factor = std::sqrt(0.5f)});
        },
        norm_.weight().num_bytes());
  }

 private:
  const ModelSpec& spec_;
  int width_;
  std::string prefix_, scope_;
  Timeline phase_;
  PerLayerInputs inputs_;
  RmsNorm norm_;
  std::unique_ptr<LinearMethod> projection_;
  MemoryPlan::Id table_id_ = 0, projected_id_ = 0;
  Tensor table_;      // [V, layers * P]
  Tensor projected_;  // [T, layers * P]
};

class PerLayerInputBlock : public Block {
 public:
  explicit PerLayerInputBlock(const BlockConfig& config)
      : spec_(config.spec),
        width_(width_of(config.params)),
        layer_(config.params.integer("layer", -1)),
        prefix_(config.prefix + "per_layer_input."),
        scope_(config.scope),
        phase_(config.phase),
        inputs_{.columns = int64_t{spec_.num_hidden_layers} * width_} {
    CHECK(!config.adds, "a per_layer_input block has no output_norm, expected one");
    CHECK(layer_ >= 0 && layer_ < spec_.num_hidden_layers,
          "a per_layer_input block has the layer {}, expected one below {}", layer_,
          spec_.num_hidden_layers);
    const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
      return make_linear(spec_.linear_method_of(prefix_ + name),
                         {.parts = {{prefix_ + name, out}},
                          .in_features = in,
                          .dtype = spec_.dtype,
                          .options = spec_.linear_options_of(prefix_ + name)});
    };
    gate_ = linear("gate", spec_.hidden_size, width_);
    projection_ = linear("projection", width_, spec_.hidden_size);
  }

  void plan(MemoryPlan& plan, ModelState&, const StepLimits& limits) override {
    gate_->plan(plan, limits);
    projection_->plan(plan, limits);
    inputs_.plan(plan, scope_, spec_.dtype, limits.max_tokens);
    const int64_t bytes = int64_t{limits.max_tokens} * width_ * size_of(spec_.dtype);
    gated_id_ = plan.add_scratch("per_layer_input.gate", bytes, phase_ + 1, phase_ + 2);
    act_id_ = plan.add_scratch("per_layer_input.act", bytes, phase_ + 1, phase_ + 3);
  }
  void bind(const Arena& arena, const ModelState&) override {
    gate_->bind(arena);
    projection_->bind(arena);
    inputs_.bind(arena, spec_.dtype);
    gated_ = arena.tensor(gated_id_, spec_.dtype, {inputs_.max_tokens, width_});
    act_ = arena.tensor(act_id_, spec_.dtype, {inputs_.max_tokens, width_});
  }
  void list_tensors(WeightTable& table) override {
    gate_->list_tensors(table);
    projection_->list_tensors(table);
  }
  void finish_loading(const Context& ctx) override {
    gate_->finish_loading(ctx);
    projection_->finish_loading(ctx);
  }
  std::string norm_name() const override { return prefix_ + "input_norm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const Value inputs = ops.value("per_layer_inputs", inputs_.rows);
    const Value gated = ops.value("per_layer_input.gate", gated_);
    const Value act = ops.value("per_layer_input.act", act_);
    ops.linear(prefix_ + "gate", *gate_, gated, x);
    ops.call(prefix_ + "activation", {gated, inputs}, {act},
             [=, this](const Context& ctx, const Step&, const Rows& rows) {
               gated_activation(ctx, {.out = rows(act),
                                      .x = rows(gated),
                                      .kind = Activation::kGeluTanh,
                                      .up = rows(inputs),
                                      .first_up = int64_t{layer_} * width_});
             });
    ops.linear(prefix_ + "projection", *projection_, hidden, act);
  }

 private:
  const ModelSpec& spec_;
  int width_, layer_;
  std::string prefix_, scope_;
  Timeline phase_;
  PerLayerInputs inputs_;
  std::unique_ptr<LinearMethod> gate_, projection_;
  MemoryPlan::Id gated_id_ = 0, act_id_ = 0;
  Tensor gated_, act_;  // [T, P] each
};

REGISTER_BLOCK("per_layer_embedding", PerLayerEmbeddingBlock);
REGISTER_BLOCK("per_layer_input", PerLayerInputBlock);

}  // namespace
}  // namespace cpmcu
