// EAGLE and EAGLE-2 heads, and MiniCPM4's variant of them: "eagle".
//
//   x = fc [embedding(id) | feature] (+ bias), each RMS-normed first in MiniCPM4's variant
//   hidden = decoder layer(x); logits = the target's lm_head of hidden
//
// The feature of a drafted token is the hidden state that the draft made of its parent.
// Sources: Li et al., arXiv:2401.15077 and arXiv:2406.16858.
#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "linear/product_queue.h"
#include "spec/head_drafter.h"

namespace cpmcu {
namespace {

class EagleDrafter : public HeadDrafter {
 public:
  EagleDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : HeadDrafter(spec, target, "EAGLE", 2 * spec.model.hidden_size) {
    if (!spec_.input_norms) return;
    embed_norm_ = add_norm("draft.input_norm1");
    feature_norm_ = add_norm("draft.input_norm2");
  }

  FeatureKind features() const override { return FeatureKind::kFinal; }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    HeadDrafter::plan(plan, limits);
    if (!spec_.fc_bias) return;
    bias_id_ = plan.add("draft.fc.bias", "weights", width() * size_of(spec_.model.dtype));
    zeros_id_ = plan.add("draft.zeros", "state", 4 * max_rows());
  }
  void bind(const Arena& arena) override {
    HeadDrafter::bind(arena);
    if (!spec_.fc_bias) return;
    bias_ = arena.tensor(bias_id_, spec_.model.dtype, {1, width()});
    zeros_ = arena.array<int>(zeros_id_);
  }
  void list_tensors(WeightTable& table) override {
    HeadDrafter::list_tensors(table);
    if (spec_.fc_bias) table.add("draft.fc.bias", bias_.view({width()}));
  }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    HeadDrafter::finish_loading(ctx, target);
    if (spec_.fc_bias) fill_bytes(ctx.device, zeros_, 0, 4 * max_rows(), ctx.stream);
  }

 protected:
  void make_layers(int first_kv_layer) override {
    for (int i = 0; i < spec_.model.num_hidden_layers; ++i) {
      const std::string prefix = "draft.layers." + std::to_string(i) + ".";
      // The original heads have no norm in front of the first layer's attention.
      const bool has_norm = i > 0 || spec_.attention_norm;
      layers_.push_back(
          {.blocks = add_layer(prefix, first_kv_layer + i),
           .attention_norm = has_norm ? add_norm(prefix + "input_layernorm") : nullptr,
           .mlp_norm = add_norm(prefix + "post_attention_layernorm")});
    }
  }

  Tensor forward(const Context& ctx, const Step& step, const Features& features, Source,
                 const KvCache& cache) override {
    const int rows = step.rows.num_rows;
    const Tensor hidden = this->hidden(rows), normed = this->normed(rows);
    embedding(ctx, {.out = embed_norm_ ? normed : left(rows),
                    .table = embedding_table_,
                    .ids = step.ids,
                    .scale = spec_.model.embed_scale,
                    .out_stride = embed_norm_ ? width() : 2 * width()});
    if (embed_norm_) {
      embed_norm_->forward(ctx, left(rows), normed, 2 * width());
      feature_norm_->forward(ctx, right(rows), features.x, 2 * width(), features.index);
    } else {
      gather_rows(ctx, {.out = right(rows),
                        .x = features.x,
                        .index = features.index,
                        .out_stride = 2 * width()});
    }
    if (spec_.fc_bias) gather_rows(ctx, {.out = hidden, .x = bias_, .index = zeros_});
    ProductQueue products(ctx, step.phase);
    const Context& queued = products.context();
    fc_->forward(queued, step.phase, hidden, both(rows), 1, spec_.fc_bias ? 1 : 0);
    for (const auto& [blocks, attention_norm, mlp_norm] : layers_) {
      if (attention_norm) attention_norm->forward(queued, normed, hidden);
      blocks.attention->forward(queued, step, hidden, attention_norm ? normed : hidden, cache);
      mlp_norm->forward(queued, normed, hidden);
      blocks.mlp->forward(queued, step, hidden, normed, cache);
    }
    products.flush();
    return hidden;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return head_.forward(ctx, hidden);
  }

 private:
  struct NormedLayer {
    Layer blocks;
    RmsNorm* attention_norm;  // may be null
    RmsNorm* mlp_norm;
  };

  RmsNorm *embed_norm_ = nullptr, *feature_norm_ = nullptr;
  std::vector<NormedLayer> layers_;
  MemoryPlan::Id bias_id_ = 0, zeros_id_ = 0;
  int* zeros_ = nullptr;
  Tensor bias_;
};

REGISTER_DRAFTER("eagle", EagleDrafter);

}  // namespace
}  // namespace cpmcu
