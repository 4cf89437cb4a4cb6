// EAGLE-3 and 3.1 heads: "eagle3".
//
//   h = fc [hidden of layer 1 | layer 2 | layer 3] of the target, or the recycled hidden state
//   one layer whose attention reads [norm(embedding(id)) | norm(h)]; the residual stream is h
//   logits = own lm_head of norm(hidden), over a draft vocabulary
//
// The recycled state is the layer's output, in 3.1 (norm_output) after the final norm.
// Source: Li et al., arXiv:2503.01840.
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "linear/gemm_queue.h"
#include "speculative/head_drafter.h"

namespace cpmcu {
namespace {

class Eagle3Drafter : public HeadDrafter {
 public:
  Eagle3Drafter(const DrafterSpec& spec, const ModelSpec& target)
      : HeadDrafter(spec, target, "EAGLE-3", num_inputs(spec, target)),
        target_layers_(spec.options.integers("target_layers")),
        norm_output_(spec.options.flag("norm_output", false)),
        layer_(add_layer(spec_.scope + "midlayer.", 2 * model().hidden_size)),
        embed_norm_(add_norm(spec_.scope + "midlayer.input_layernorm")),
        hidden_norm_(add_norm(spec_.scope + "midlayer.hidden_norm")),
        mlp_norm_(add_norm(spec_.scope + "midlayer.post_attention_layernorm")),
        final_norm_(add_norm(spec_.scope + "norm")) {
    spec_.options.check_known("an EAGLE-3 head",
                              {"window", "vocab_ids", "own_head", "target_layers", "norm_output"});
    CHECK(!target_layers_.empty(), "the EAGLE-3 head names no target layers");
    for (int layer : target_layers_) {
      CHECK(layer >= 0 && layer < target.num_hidden_layers,
            "the draft wants the input of layer {}, the target has {}", layer,
            target.num_hidden_layers);
    }
  }

  HiddenNeeds needs() const override { return {.layers = target_layers_}; }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    HeadDrafter::plan(plan, states, limits);
    const int64_t element = size_of(model().dtype);
    num_gathered_ = max_tokens();
    num_recycled_ = int64_t{limits.max_seqs} * spec_.topk;
    gathered_id_ = plan.add_scratch(
        spec_.scope + "gathered", num_gathered_ * num_inputs(spec_, target_) * element, 0, kSample);
    turn_id_ = plan.add_scratch(spec_.scope + "turn_hidden", num_recycled_ * width() * element, 0,
                                kSample);
  }
  void bind(const Arena& arena) override {
    HeadDrafter::bind(arena);
    const DType dtype = model().dtype;
    gathered_ = arena.tensor(gathered_id_, dtype, {num_gathered_, num_inputs(spec_, target_)});
    turn_hidden_ = arena.tensor(turn_id_, dtype, {num_recycled_, width()});
  }

 protected:
  Tensor pick(const HiddenStates& states) const override { return states.layers; }

  Tensor forward(const Context& ctx, const Step& step, const HiddenRows& given,
                 Source source) override {
    const int rows = step.tokens.num_tokens;
    const Tensor normed = this->normed(rows);
    Tensor hidden = this->hidden(rows);
    if (source == Source::kTarget) {
      Tensor x = given.x;
      if (given.index) {
        x = gathered_.rows(0, rows);
        gather_rows(ctx, {.out = x, .x = given.x, .index = given.index});
      }
      fc_->forward(ctx, step.phase, hidden, x, 1, 0);
    } else {
      // Rows change places, so they cannot stay where they are.
      if (given.x.data() == hidden.data()) hidden = turn_hidden_.rows(0, rows);
      gather_rows(ctx, {.out = hidden, .x = given.x, .index = given.index});
    }
    embedding(
        ctx,
        {.out = normed, .table = embedding_table_, .ids = step.ids, .scale = model().embed_scale});
    embed_norm_->forward(ctx, left(rows), normed, 2 * width());
    hidden_norm_->forward(ctx, right(rows), hidden, 2 * width());
    GemmQueue gemms(ctx, step.phase);
    const Context& queued = gemms.context();
    layer_.attention->forward(queued, step, hidden, both(rows));
    mlp_norm_->forward(queued, normed, hidden);
    layer_.mlp->forward(queued, step, hidden, normed);
    gemms.flush();
    if (!norm_output_) return hidden;
    final_norm_->forward(ctx, normed, hidden);
    return normed;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    if (norm_output_) return head_.forward(ctx, hidden);
    const Tensor normed = this->normed(static_cast<int>(hidden.size(0)));
    final_norm_->forward(ctx, normed, hidden);
    return head_.forward(ctx, normed);
  }

 private:
  // Columns of fc.
  static int num_inputs(const DrafterSpec& spec, const ModelSpec& target) {
    return static_cast<int>(spec.options.integers("target_layers").size()) * target.hidden_size;
  }

  const std::vector<int> target_layers_;
  const bool norm_output_;  // EAGLE-3.1: the recycled hidden state is the normed one
  Layer layer_;
  RmsNorm *embed_norm_, *hidden_norm_, *mlp_norm_, *final_norm_;
  MemoryPlan::Id gathered_id_ = 0, turn_id_ = 0;
  int64_t num_gathered_ = 0, num_recycled_ = 0;
  Tensor gathered_;     // [rows, layers * H]
  Tensor turn_hidden_;  // [max_seqs * k, H]: of every other level
};

REGISTER_DRAFTER("eagle3", Eagle3Drafter);

}  // namespace
}  // namespace cpmcu
