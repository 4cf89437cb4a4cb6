// EAGLE-3 and 3.1 heads: "eagle3".
//
//   h = fc [aux_hidden of 3 target layers], or for a drafted token the parent's recycled state
//   hidden = one layer: attention reads [norm(embedding(id)) | norm(h)], the residual stream is h
//   logits = own lm_head of norm(hidden), over a draft vocabulary
//
// The recycled state is `hidden`; in EAGLE-3.1 (norm_output) it is norm(hidden). There fc's input
// is normed: each aux_hidden by a norm of its own (fc_norm), or all of them by one
// (norm_before_fc). With norm_before_residual the residual stream is norm(h). Source: Li et al.,
// arXiv:2503.01840.
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "speculative/head_drafter.h"

namespace cpmcu {
namespace {

class Eagle3Drafter : public HeadDrafter {
 public:
  Eagle3Drafter(const DrafterSpec& spec, const ModelSpec& target)
      : HeadDrafter(spec, target, "EAGLE-3"),
        fc_(parts_.add_linear(spec_.scope + "fc", num_inputs(spec, target))),
        target_layers_(spec.options.integers("target_layers")),
        norm_output_(spec.options.flag("norm_output", false)),
        norm_residual_(spec.options.flag("norm_before_residual", false)),
        layer_(add_layer(spec_.scope + "midlayer.", 2 * model().hidden_size)),
        embed_norm_(parts_.add_norm(spec_.scope + "midlayer.input_layernorm")),
        hidden_norm_(parts_.add_norm(spec_.scope + "midlayer.hidden_norm")),
        mlp_norm_(parts_.add_norm(spec_.scope + "midlayer.post_attention_layernorm")),
        final_norm_(parts_.add_norm(spec_.scope + "norm")) {
    spec_.options.check_known("an EAGLE-3 head",
                              {"window", "topk", "vocab_ids", "own_head", "target_layers",
                               "norm_output", "fc_norm", "norm_before_fc", "norm_before_residual"});
    CHECK(!target_layers_.empty(),
          "the EAGLE-3 head has no target_layers, expected at least one layer");
    for (int layer : target_layers_) {
      CHECK(layer >= 0 && layer < target.num_hidden_layers,
            "the draft reads the input of target layer {}, the target has {} layers", layer,
            target.num_hidden_layers);
    }
    if (spec.options.flag("norm_before_fc", false)) {
      all_norm_ = parts_.add_norm(spec_.scope + "input_norm", num_inputs(spec, target));
    }
    if (spec.options.flag("fc_norm", false)) {
      for (size_t i = 0; i < target_layers_.size(); ++i) {
        each_norm_.push_back(parts_.add_norm(spec_.scope + "fc_norm." + std::to_string(i)));
      }
    }
  }

  HiddenNeeds needs() const override { return {.layers = target_layers_}; }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    HeadDrafter::plan(plan, states, limits);
    const int64_t element = size_of(model().dtype);
    num_gathered_ = parts_.max_tokens();
    num_recycled_ = int64_t{limits.max_seqs} * topk_;
    gathered_id_ = plan.add_scratch(
        spec_.scope + "gathered", num_gathered_ * num_inputs(spec_, target_) * element, 0, kSample);
    if (all_norm_ || !each_norm_.empty()) {
      normed_id_ =
          plan.add_scratch(spec_.scope + "normed_inputs",
                           num_gathered_ * num_inputs(spec_, target_) * element, 0, kSample);
    }
    if (!each_norm_.empty()) {
      rows_id_ = plan.add(spec_.scope + "aux_rows", "state", 4 * num_gathered_ * num_layers());
    }
    alternate_id_ = plan.add_scratch(spec_.scope + "alternate_hidden",
                                     num_recycled_ * width() * element, 0, kSample);
  }
  void bind(const Arena& arena) override {
    HeadDrafter::bind(arena);
    const DType dtype = model().dtype;
    gathered_ = arena.tensor(gathered_id_, dtype, {num_gathered_, num_inputs(spec_, target_)});
    if (all_norm_ || !each_norm_.empty()) {
      normed_inputs_ = arena.tensor(normed_id_, dtype, {num_gathered_, num_inputs(spec_, target_)});
    }
    if (!each_norm_.empty()) rows_ = arena.array<int>(rows_id_);
    alternate_hidden_ = arena.tensor(alternate_id_, dtype, {num_recycled_, width()});
    pass_.append([&](OpList& ops) { append(ops, parts_.hidden_value(ops)); });
    alternate_pass_.append(
        [&](OpList& ops) { append(ops, ops.value("alternate_hidden", alternate_hidden_)); });
  }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    HeadDrafter::finish_loading(ctx, target);
    pass_.cut(HeadParts::cut_target(ctx));
    alternate_pass_.cut(HeadParts::cut_target(ctx));
    if (each_norm_.empty()) return;
    std::vector<int> rows;
    for (int layer = 0; layer < num_layers(); ++layer) {
      for (int64_t t = 0; t < num_gathered_; ++t) {
        rows.push_back(static_cast<int>(t * num_layers() + layer));
      }
    }
    copy_to_device(ctx.device, rows_, rows.data(), static_cast<int64_t>(4 * rows.size()),
                   ctx.stream);
    synchronize(ctx.device, ctx.stream);
  }

 protected:
  Tensor select_hidden(const HiddenStates& states) const override { return states.layers; }

  Tensor forward(const Context& ctx, const Step& step, const HiddenRows& given,
                 Source source) override {
    const int num_tokens = step.tokens.num_tokens;
    const Tensor normed = parts_.normed(num_tokens);
    Tensor hidden = parts_.hidden(num_tokens);
    bool alternates = false;
    if (source == Source::kTarget) {
      Tensor x = given.x;
      if (given.index) {
        x = gathered_.rows(0, num_tokens);
        gather_rows(ctx, {.out = x, .x = given.x, .index = given.index});
      }
      fc_->forward(ctx, step.phase, hidden, norm_inputs(ctx, x), 1, 0);
    } else {
      // The gather permutes rows, so its input and output must be different buffers.
      alternates = given.x.data() == hidden.data();
      if (alternates) hidden = alternate_hidden_.rows(0, num_tokens);
      gather_rows(ctx, {.out = hidden, .x = given.x, .index = given.index});
    }
    embedding(ctx, {.out = normed,
                    .table = parts_.embedding_table(),
                    .ids = step.ids,
                    .scale = model().embed_scale});
    embed_norm_->forward(ctx, left(num_tokens), normed, 2 * width());
    if (norm_residual_) {
      hidden_norm_->forward(ctx, hidden, hidden);
      gather_rows(ctx, {.out = right(num_tokens), .x = hidden, .out_stride = 2 * width()});
    } else {
      hidden_norm_->forward(ctx, right(num_tokens), hidden, 2 * width());
    }
    (alternates ? alternate_pass_ : pass_).replay(ctx, step);
    if (!norm_output_) return hidden;
    final_norm_->forward(ctx, normed, hidden);
    return normed;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    if (norm_output_) return parts_.output().forward(ctx, hidden);
    const Tensor normed = parts_.normed(static_cast<int>(hidden.size(0)));
    final_norm_->forward(ctx, normed, hidden);
    return parts_.output().forward(ctx, normed);
  }

 private:
  void append(OpList& ops, const Value& hidden) const {
    const Value normed = parts_.normed_value(ops);
    layer_.attention->append(ops, hidden, both_value(ops));
    mlp_norm_->append(ops, normed, hidden);
    layer_.mlp->append(ops, hidden, normed);
  }

  int num_layers() const { return static_cast<int>(target_layers_.size()); }

  // The input of fc [T, layers * H] from the target's auxiliary hidden states.
  Tensor norm_inputs(const Context& ctx, const Tensor& x) {
    if (!all_norm_ && each_norm_.empty()) return x;
    const int64_t num_tokens = x.size(0), columns = x.size(1);
    const Tensor normed = normed_inputs_.rows(0, num_tokens);
    if (all_norm_) {
      all_norm_->forward(ctx, normed, x);
      return normed;
    }
    // Row t * layers + i of `states` is the hidden state i of token t.
    const Tensor states = x.view({num_tokens * num_layers(), width()});
    for (int i = 0; i < num_layers(); ++i) {
      const Tensor out(normed.as<char>() + i * width() * size_of(x.dtype()), x.dtype(),
                       {num_tokens, width()});
      each_norm_[static_cast<size_t>(i)]->forward(ctx, out, states, columns,
                                                  rows_ + i * num_gathered_);
    }
    return normed;
  }

  // Input columns of fc.
  static int num_inputs(const DrafterSpec& spec, const ModelSpec& target) {
    return static_cast<int>(spec.options.integers("target_layers").size()) * target.hidden_size;
  }

  LinearMethod* fc_;
  const std::vector<int> target_layers_;
  const bool norm_output_;    // EAGLE-3.1: the recycled state has a norm
  const bool norm_residual_;  // the residual stream has a norm
  HeadParts::Layer layer_;
  RmsNorm *embed_norm_, *hidden_norm_, *mlp_norm_, *final_norm_;
  RmsNorm* all_norm_ = nullptr;  // norm of fc's whole input; null: there is none
  // A norm for each auxiliary hidden state; empty: there are none.
  std::vector<RmsNorm*> each_norm_{};
  // Both run the layer. They have the residual stream in different buffers.
  Pass pass_, alternate_pass_;
  MemoryPlan::Id gathered_id_ = 0, alternate_id_ = 0, normed_id_ = 0, rows_id_ = 0;
  int64_t num_gathered_ = 0, num_recycled_ = 0;
  Tensor gathered_;          // [T, layers * H]
  Tensor normed_inputs_;     // [T, layers * H]
  int* rows_ = nullptr;      // [layers, T]: rows of the hidden states of each layer
  Tensor alternate_hidden_;  // [max_seqs * k, H]: hidden states of every second level
};

REGISTER_DRAFTER("eagle3", Eagle3Drafter);

}  // namespace
}  // namespace cpmcu
