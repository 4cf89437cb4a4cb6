// EAGLE-3 and 3.1 heads: "eagle3".
//
//   h = fc [feature 1 | feature 2 | feature 3] from the target, or the recycled hidden state
//   one layer whose attention reads [norm(embedding(id)) | norm(h)]; the residual stream is h
//   logits = own lm_head of norm(hidden), over a draft vocabulary
//
// The recycled state is the layer's output, in 3.1 (norm_output) after the final norm.
// Source: Li et al., arXiv:2503.01840.
#include "kernels/embedding.h"
#include "kernels/gather_rows.h"
#include "linear/product_queue.h"
#include "spec/head_drafter.h"

namespace cpmcu {
namespace {

class Eagle3Drafter : public HeadDrafter {
 public:
  Eagle3Drafter(const DrafterSpec& spec, const ModelSpec& target)
      : HeadDrafter(spec, target, "EAGLE-3", num_features(spec, target)),
        embed_norm_(add_norm("draft.midlayer.input_layernorm")),
        hidden_norm_(add_norm("draft.midlayer.hidden_norm")),
        mlp_norm_(add_norm("draft.midlayer.post_attention_layernorm")),
        final_norm_(add_norm("draft.norm")) {
    CHECK(!spec_.feature_layers.empty(), "the EAGLE-3 head names no target layers");
  }

  FeatureKind features() const override { return FeatureKind::kLayers; }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    HeadDrafter::plan(plan, limits);
    const int64_t element = size_of(spec_.model.dtype);
    num_pending_ = int64_t{limits.max_seqs} * (spec_.depth + 1);
    num_recycled_ = int64_t{limits.max_seqs} * spec_.topk;
    pending_id_ = plan.add_scratch(
        "draft.pending", num_pending_ * num_features(spec_, target_) * element, 0, kSample);
    turn_id_ = plan.add_scratch("draft.turn_hidden", num_recycled_ * width() * element, 0, kSample);
  }
  void bind(const Arena& arena) override {
    HeadDrafter::bind(arena);
    const DType dtype = spec_.model.dtype;
    pending_ = arena.tensor(pending_id_, dtype, {num_pending_, num_features(spec_, target_)});
    turn_hidden_ = arena.tensor(turn_id_, dtype, {num_recycled_, width()});
  }

 protected:
  void make_layers(int first_kv_layer) override {
    layer_ = add_layer("draft.midlayer.", first_kv_layer, 2 * spec_.model.hidden_size);
  }

  Tensor forward(const Context& ctx, const Step& step, const Features& features, Source source,
                 const KvCache& cache) override {
    const int rows = step.rows.num_rows;
    const Tensor normed = this->normed(rows);
    Tensor hidden = this->hidden(rows);
    if (source == Source::kTarget) {
      Tensor x = features.x;
      if (features.index) {
        x = pending_.rows(0, rows);
        gather_rows(ctx, {.out = x, .x = features.x, .index = features.index});
      }
      fc_->forward(ctx, step.phase, hidden, x, 1, 0);
    } else {
      // Rows change places, so they cannot stay where they are.
      if (features.x.data() == hidden.data()) hidden = turn_hidden_.rows(0, rows);
      gather_rows(ctx, {.out = hidden, .x = features.x, .index = features.index});
    }
    embedding(ctx, {.out = normed,
                    .table = embedding_table_,
                    .ids = step.ids,
                    .scale = spec_.model.embed_scale});
    embed_norm_->forward(ctx, left(rows), normed, 2 * width());
    hidden_norm_->forward(ctx, right(rows), hidden, 2 * width());
    ProductQueue products(ctx, step.phase);
    const Context& queued = products.context();
    layer_.attention->forward(queued, step, hidden, both(rows), cache);
    mlp_norm_->forward(queued, normed, hidden);
    layer_.mlp->forward(queued, step, hidden, normed, cache);
    products.flush();
    if (!spec_.norm_output) return hidden;
    final_norm_->forward(ctx, normed, hidden);
    return normed;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    if (spec_.norm_output) return head_.forward(ctx, hidden);
    const Tensor normed = this->normed(static_cast<int>(hidden.size(0)));
    final_norm_->forward(ctx, normed, hidden);
    return head_.forward(ctx, normed);
  }

 private:
  static int num_features(const DrafterSpec& spec, const ModelSpec& target) {
    return static_cast<int>(spec.feature_layers.size()) * target.hidden_size;
  }

  Layer layer_{};
  RmsNorm *embed_norm_, *hidden_norm_, *mlp_norm_, *final_norm_;
  MemoryPlan::Id pending_id_ = 0, turn_id_ = 0;
  int64_t num_pending_ = 0, num_recycled_ = 0;
  Tensor pending_;      // [max_seqs * (D + 1), F]
  Tensor turn_hidden_;  // [max_seqs * k, H]: of every other level
};

REGISTER_DRAFTER("eagle3", Eagle3Drafter);

}  // namespace
}  // namespace cpmcu
