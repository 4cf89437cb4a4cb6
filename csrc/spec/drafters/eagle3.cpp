// EAGLE-3 and 3.1 heads: "eagle3".
//
//   h = fc [feature 1 | feature 2 | feature 3] from the target, or the recycled hidden state
//   one layer whose attention reads [norm(embedding(id)) | norm(h)]; the residual stream is h
//   logits = own lm_head of norm(hidden), over a draft vocabulary
//
// The recycled state is the layer's output, in 3.1 (norm_output) after the final norm.
// Source: Li et al., arXiv:2503.01840.
#include <algorithm>

#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "layers/block.h"
#include "layers/norm.h"
#include "linear/linear.h"
#include "spec/beam_drafter.h"
#include "spec/draft_head.h"

namespace cpmcu {
namespace {

class Eagle3Drafter : public BeamDrafter {
 public:
  Eagle3Drafter(const DrafterSpec& spec, const ModelSpec& target)
      : BeamDrafter(spec, target),
        head_(spec_, target),
        embed_norm_(spec_.model, "draft.midlayer.input_layernorm"),
        hidden_norm_(spec_.model, "draft.midlayer.hidden_norm"),
        mlp_norm_(spec_.model, "draft.midlayer.post_attention_layernorm"),
        final_norm_(spec_.model, "draft.norm") {
    const ModelSpec& model = spec_.model;
    CHECK(model.hidden_size == target.hidden_size,
          "the EAGLE-3 head has hidden_size {}, the target {}", model.hidden_size,
          target.hidden_size);
    CHECK(!spec_.feature_layers.empty(), "the EAGLE-3 head names no target layers");
    fc_ =
        make_linear(model.linear_method_of("draft.fc"), {.parts = {{"draft.fc", model.hidden_size}},
                                                         .in_features = feature_size(),
                                                         .dtype = model.dtype,
                                                         .options = model.linear_options});
  }

  FeatureKind features() const override { return FeatureKind::kLayers; }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    BeamDrafter::plan(plan, limits);
    const ModelSpec& model = spec_.model;
    const int decode_rows = limits.max_seqs * std::max(spec_.depth + 1, spec_.topk);
    max_rows_ = std::max(limits.max_prompt_rows, decode_rows);
    const StepLimits step{.max_rows = static_cast<int>(max_rows_),
                          .max_decode_rows = decode_rows,
                          .max_model_len = limits.max_model_len};
    const BlockConfig attention{.spec = model,
                                .prefix = "draft.midlayer.",
                                .scope = "draft.",
                                .kv_layer = limits.first_kv_layer,
                                .in_features = 2 * model.hidden_size,
                                .window = spec_.window,
                                .phase = kMixer};
    BlockConfig mlp = attention;
    mlp.in_features = 0;
    mlp.phase = kMlp;
    attention_ = BlockRegistry::instance().create("block", "attention", attention);
    mlp_ = BlockRegistry::instance().create("block", "mlp", mlp);
    fc_->plan(plan, step);
    attention_->plan(plan, step);
    mlp_->plan(plan, step);
    for (RmsNorm* norm : norms()) norm->plan(plan);
    head_.plan(plan, step);
    const int64_t row_bytes = int64_t{model.hidden_size} * size_of(model.dtype);
    concat_id_ = plan.add_scratch("draft.concat", 2 * max_rows_ * row_bytes, 0, kSample);
    hidden_id_ = plan.add_scratch("draft.hidden", max_rows_ * row_bytes, 0, kSample);
    normed_id_ = plan.add_scratch("draft.normed", max_rows_ * row_bytes, 0, kSample);
  }

  void bind(const Arena& arena) override {
    BeamDrafter::bind(arena);
    const ModelSpec& model = spec_.model;
    fc_->bind(arena);
    attention_->bind(arena);
    mlp_->bind(arena);
    for (RmsNorm* norm : norms()) norm->bind(arena);
    head_.bind(arena);
    concat_ = arena.tensor(concat_id_, model.dtype, {max_rows_, 2 * model.hidden_size});
    hidden_ = arena.tensor(hidden_id_, model.dtype, {max_rows_, model.hidden_size});
    normed_ = arena.tensor(normed_id_, model.dtype, {max_rows_, model.hidden_size});
  }

  void list_tensors(WeightTable& table) override {
    fc_->list_tensors(table);
    attention_->list_tensors(table);
    mlp_->list_tensors(table);
    for (RmsNorm* norm : norms()) norm->list_tensors(table);
    head_.list_tensors(table);
  }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BeamDrafter::finish_loading(ctx, target);
    embedding_table_ = target.embedding_table;
    fc_->finish_loading(ctx);
    attention_->finish_loading(ctx);
    mlp_->finish_loading(ctx);
    head_.finish_loading(ctx, target);
  }

 protected:
  Tensor forward(const Context& ctx, const Step& step, const Tensor& features, Source source,
                 const KvCache& cache) override {
    const int rows = step.rows.num_rows;
    const int64_t width = spec_.model.hidden_size;
    const Tensor hidden = hidden_.rows(0, rows), normed = normed_.rows(0, rows);
    const Tensor left(concat_.data(), concat_.dtype(), {rows, width});
    const Tensor right(concat_.as<char>() + width * size_of(concat_.dtype()), concat_.dtype(),
                       {rows, width});
    if (source == Source::kTarget) {
      fc_->forward(ctx, step.phase, hidden, features, 1, 0);
    } else {
      gather_rows(ctx, {.out = hidden, .x = features});
    }
    embedding(ctx, {.out = normed,
                    .table = embedding_table_,
                    .ids = step.ids,
                    .scale = spec_.model.embed_scale});
    embed_norm_.forward(ctx, left, normed, 2 * width);
    hidden_norm_.forward(ctx, right, hidden, 2 * width);
    ProductQueue products(ctx, step.phase);
    attention_->forward(products.context(), step, hidden, concat_.rows(0, rows), cache);
    mlp_norm_.forward(products.context(), normed, hidden);
    mlp_->forward(products.context(), step, hidden, normed, cache);
    products.flush();
    if (!spec_.norm_output) return hidden;
    final_norm_.forward(ctx, normed, hidden);
    return normed;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    if (spec_.norm_output) return head_.forward(ctx, hidden);
    const Tensor normed = normed_.rows(0, hidden.size(0));
    final_norm_.forward(ctx, normed, hidden);
    return head_.forward(ctx, normed);
  }
  bool shifted() const override { return true; }
  int feature_size() const override {
    return static_cast<int>(spec_.feature_layers.size()) * target_.hidden_size;
  }

 private:
  std::vector<RmsNorm*> norms() { return {&embed_norm_, &hidden_norm_, &mlp_norm_, &final_norm_}; }

  DraftHead head_;
  std::unique_ptr<LinearMethod> fc_;
  std::unique_ptr<Block> attention_, mlp_;
  RmsNorm embed_norm_, hidden_norm_, mlp_norm_, final_norm_;
  int64_t max_rows_ = 0;
  MemoryPlan::Id concat_id_ = 0, hidden_id_ = 0, normed_id_ = 0;
  Tensor embedding_table_, concat_, hidden_, normed_;
};

REGISTER_DRAFTER("eagle3", Eagle3Drafter);

}  // namespace
}  // namespace cpmcu
