// EAGLE and EAGLE-2 heads, and MiniCPM4's variant of them: "eagle".
//
//   x = fc [embedding(id) | feature] (+ bias), each RMS-normed first in MiniCPM4's variant
//   hidden = decoder layer(x); logits = the target's lm_head of hidden
//
// The feature of a drafted token is the hidden state that the draft made of its parent.
// Sources: Li et al., arXiv:2401.15077 and arXiv:2406.16858.
#include <algorithm>

#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "kernels/rms_norm.h"
#include "layers/block.h"
#include "layers/norm.h"
#include "linear/linear.h"
#include "spec/beam_drafter.h"
#include "spec/draft_head.h"

namespace cpmcu {
namespace {

class EagleDrafter : public BeamDrafter {
 public:
  EagleDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BeamDrafter(spec, target),
        head_(spec_, target),
        embed_norm_(spec_.model, "draft.input_norm1"),
        feature_norm_(spec_.model, "draft.input_norm2") {
    const ModelSpec& model = spec_.model;
    CHECK(model.hidden_size == target.hidden_size,
          "the EAGLE head has hidden_size {}, the target {}", model.hidden_size,
          target.hidden_size);
    fc_ =
        make_linear(model.linear_method_of("draft.fc"), {.parts = {{"draft.fc", model.hidden_size}},
                                                         .in_features = 2 * model.hidden_size,
                                                         .dtype = model.dtype,
                                                         .options = model.linear_options});
  }

  FeatureKind features() const override { return FeatureKind::kFinal; }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    BeamDrafter::plan(plan, limits);
    const ModelSpec& model = spec_.model;
    const int decode_rows = limits.max_seqs * std::max(spec_.depth + 1, spec_.topk);
    max_rows_ = std::max(limits.max_prompt_rows, decode_rows);
    const StepLimits step{.max_rows = static_cast<int>(max_rows_),
                          .max_decode_rows = decode_rows,
                          .max_model_len = limits.max_model_len};
    for (int layer = 0; layer < model.num_hidden_layers; ++layer) {
      const std::string prefix = "draft.layers." + std::to_string(layer) + ".";
      const BlockConfig config{.spec = model,
                               .prefix = prefix,
                               .scope = "draft.",
                               .kv_layer = limits.first_kv_layer + layer,
                               .window = spec_.window,
                               .phase = kMixer};
      BlockConfig mlp = config;
      mlp.phase = kMlp;
      Layer made{.attention_norm = RmsNorm(model, prefix + "input_layernorm"),
                 .mlp_norm = RmsNorm(model, prefix + "post_attention_layernorm"),
                 .attention = BlockRegistry::instance().create("block", "attention", config),
                 .mlp = BlockRegistry::instance().create("block", "mlp", mlp)};
      layers_.push_back(std::move(made));
    }
    fc_->plan(plan, step);
    for (Layer& layer : layers_) {
      if (has_attention_norm(layer)) layer.attention_norm.plan(plan);
      layer.mlp_norm.plan(plan);
      layer.attention->plan(plan, step);
      layer.mlp->plan(plan, step);
    }
    if (spec_.input_norms) {
      embed_norm_.plan(plan);
      feature_norm_.plan(plan);
    }
    head_.plan(plan, step);
    const int64_t row_bytes = int64_t{model.hidden_size} * size_of(model.dtype);
    if (spec_.fc_bias) bias_id_ = plan.add("draft.fc.bias", "weights", row_bytes);
    if (spec_.fc_bias) zeros_id_ = plan.add("draft.zeros", "state", 4 * max_rows_);
    concat_id_ = plan.add_scratch("draft.concat", 2 * max_rows_ * row_bytes, 0, kSample);
    hidden_id_ = plan.add_scratch("draft.hidden", max_rows_ * row_bytes, 0, kSample);
    normed_id_ = plan.add_scratch("draft.normed", max_rows_ * row_bytes, 0, kSample);
  }

  void bind(const Arena& arena) override {
    BeamDrafter::bind(arena);
    const ModelSpec& model = spec_.model;
    fc_->bind(arena);
    for (Layer& layer : layers_) {
      if (has_attention_norm(layer)) layer.attention_norm.bind(arena);
      layer.mlp_norm.bind(arena);
      layer.attention->bind(arena);
      layer.mlp->bind(arena);
    }
    if (spec_.input_norms) {
      embed_norm_.bind(arena);
      feature_norm_.bind(arena);
    }
    head_.bind(arena);
    if (spec_.fc_bias) {
      bias_ = arena.tensor(bias_id_, model.dtype, {1, model.hidden_size});
      zeros_ = arena.array<int>(zeros_id_);
    }
    concat_ = arena.tensor(concat_id_, model.dtype, {max_rows_, 2 * model.hidden_size});
    hidden_ = arena.tensor(hidden_id_, model.dtype, {max_rows_, model.hidden_size});
    normed_ = arena.tensor(normed_id_, model.dtype, {max_rows_, model.hidden_size});
  }

  void list_tensors(WeightTable& table) override {
    fc_->list_tensors(table);
    if (spec_.fc_bias) table.add("draft.fc.bias", bias_.view({spec_.model.hidden_size}));
    if (spec_.input_norms) {
      embed_norm_.list_tensors(table);
      feature_norm_.list_tensors(table);
    }
    for (Layer& layer : layers_) {
      if (has_attention_norm(layer)) layer.attention_norm.list_tensors(table);
      layer.mlp_norm.list_tensors(table);
      layer.attention->list_tensors(table);
      layer.mlp->list_tensors(table);
    }
    head_.list_tensors(table);
  }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BeamDrafter::finish_loading(ctx, target);
    embedding_table_ = target.embedding_table;
    fc_->finish_loading(ctx);
    for (Layer& layer : layers_) {
      layer.attention->finish_loading(ctx);
      layer.mlp->finish_loading(ctx);
    }
    head_.finish_loading(ctx, target);
    if (spec_.fc_bias) fill_bytes(ctx.device, zeros_, 0, 4 * max_rows_, ctx.stream);
  }

 protected:
  Tensor forward(const Context& ctx, const Step& step, const Tensor& features, Source,
                 const KvCache& cache) override {
    const int rows = step.rows.num_rows;
    const int64_t width = spec_.model.hidden_size;
    const Tensor hidden = hidden_.rows(0, rows), normed = normed_.rows(0, rows);
    const Tensor left(concat_.data(), concat_.dtype(), {rows, width});
    const Tensor right(concat_.as<char>() + width * size_of(concat_.dtype()), concat_.dtype(),
                       {rows, width});
    const EmbeddingParams embed{.out = spec_.input_norms ? normed : left,
                                .table = embedding_table_,
                                .ids = step.ids,
                                .scale = spec_.model.embed_scale,
                                .out_stride = spec_.input_norms ? width : 2 * width};
    embedding(ctx, embed);
    if (spec_.input_norms) {
      embed_norm_.forward(ctx, left, normed, 2 * width);
      feature_norm_.forward(ctx, right, features, 2 * width);
    } else {
      gather_rows(ctx, {.out = right, .x = features, .out_stride = 2 * width});
    }
    if (spec_.fc_bias) gather_rows(ctx, {.out = hidden, .x = bias_, .index = zeros_});
    ProductQueue products(ctx, step.phase);
    const Context& queued = products.context();
    fc_->forward(queued, step.phase, hidden, concat_.rows(0, rows), 1, spec_.fc_bias ? 1 : 0);
    for (const Layer& layer : layers_) {
      const bool has_norm = has_attention_norm(layer);
      if (has_norm) layer.attention_norm.forward(queued, normed, hidden);
      layer.attention->forward(queued, step, hidden, has_norm ? normed : hidden, cache);
      layer.mlp_norm.forward(queued, normed, hidden);
      layer.mlp->forward(queued, step, hidden, normed, cache);
    }
    products.flush();
    return hidden;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return head_.forward(ctx, hidden);
  }
  bool shifted() const override { return true; }
  int feature_size() const override { return spec_.model.hidden_size; }

 private:
  struct Layer {
    RmsNorm attention_norm, mlp_norm;
    std::unique_ptr<Block> attention, mlp;
  };

  // The original heads have no norm in front of the first layer's attention.
  bool has_attention_norm(const Layer& layer) const {
    return spec_.attention_norm || &layer != &layers_.front();
  }

  DraftHead head_;
  std::unique_ptr<LinearMethod> fc_;
  RmsNorm embed_norm_, feature_norm_;
  std::vector<Layer> layers_;
  int64_t max_rows_ = 0;
  MemoryPlan::Id bias_id_ = 0, zeros_id_ = 0, concat_id_ = 0, hidden_id_ = 0, normed_id_ = 0;
  int* zeros_ = nullptr;
  Tensor embedding_table_, bias_, concat_, hidden_, normed_;
};

REGISTER_DRAFTER("eagle", EagleDrafter);

}  // namespace
}  // namespace cpmcu
