// EAGLE and EAGLE-2 heads, and MiniCPM4's variant of them: "eagle". The multi-token prediction head
// of Qwen3-Next and Qwen3.5, one module that runs once for each level: "mtp".
//
//   x = fc [embedding(id) | aux_hidden] (+ bias)
//   hidden = decoder layer(x); logits = the target's lm_head of hidden
//
// MiniCPM4's variant and "mtp" RMS-norm both halves of fc's input. "mtp" also norms `hidden`.
//
// `aux_hidden` is the target's final hidden state of the preceding token. For a drafted token it is
// the draft's hidden state of the parent token.
// Sources: Li et al., arXiv:2401.15077 and arXiv:2406.16858; DeepSeek-AI, arXiv:2412.19437, 2.2.
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "linear/gemm_queue.h"
#include "speculative/head_drafter.h"

namespace cpmcu {
namespace {

class EagleDrafter : public HeadDrafter {
 public:
  EagleDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : EagleDrafter(spec, target, "EAGLE",
                     {.input = spec.options.flag("input_norms", false),
                      .first_attention = spec.options.flag("attention_norm", false)}) {
    spec_.options.check_known("an EAGLE head", {"window", "vocab_ids", "own_head", "input_norms",
                                                "attention_norm", "fc_bias"});
  }

  HiddenNeeds needs() const override { return {.final = true}; }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    HeadDrafter::plan(plan, states, limits);
    if (!has_bias_) return;
    bias_id_ = plan.add(spec_.scope + "fc.bias", "weights", width() * size_of(model().dtype));
    zeros_id_ = plan.add(spec_.scope + "zeros", "state", 4 * max_tokens());
  }
  void bind(const Arena& arena) override {
    HeadDrafter::bind(arena);
    if (!has_bias_) return;
    bias_ = arena.tensor(bias_id_, model().dtype, {1, width()});
    zeros_ = arena.array<int>(zeros_id_);
  }
  void list_tensors(WeightTable& table) override {
    HeadDrafter::list_tensors(table);
    if (has_bias_) table.add(spec_.scope + "fc.bias", bias_.view({width()}));
  }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    HeadDrafter::finish_loading(ctx, target);
    if (has_bias_) fill_bytes(ctx.device, zeros_, 0, 4 * max_tokens(), ctx.stream);
  }

 protected:
  // Norms that not every kind of head has.
  struct Norms {
    bool input = false;            // of both halves of fc's input
    bool first_attention = false;  // before the first layer's attention
    bool final = false;            // of the result
  };

  EagleDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
               const Norms& norms)
      : HeadDrafter(spec, target, kind, 2 * spec.model->hidden_size),
        has_bias_(spec.options.flag("fc_bias", false)) {
    if (norms.input) {
      embed_norm_ = add_norm(spec_.scope + "input_norm1");
      aux_hidden_norm_ = add_norm(spec_.scope + "input_norm2");
    }
    for (int i = 0; i < model().num_hidden_layers; ++i) {
      const std::string prefix = spec_.scope + "layers." + std::to_string(i) + ".";
      const bool has_norm = i > 0 || norms.first_attention;
      layers_.push_back(
          {.blocks = add_layer(prefix, 0, model().layer(i)),
           .attention_norm = has_norm ? add_norm(prefix + "input_layernorm") : nullptr,
           .mlp_norm = add_norm(prefix + "post_attention_layernorm")});
    }
    if (norms.final) final_norm_ = add_norm(spec_.scope + "norm");
  }

  Tensor select_hidden(const HiddenStates& states) const override { return states.final; }

  Tensor forward(const Context& ctx, const Step& step, const HiddenRows& aux_hidden,
                 Source) override {
    const int num_tokens = step.tokens.num_tokens;
    const Tensor hidden = this->hidden(num_tokens), normed = this->normed(num_tokens);
    embedding(ctx, {.out = embed_norm_ ? normed : left(num_tokens),
                    .table = embedding_table_,
                    .ids = step.ids,
                    .scale = model().embed_scale,
                    .out_stride = embed_norm_ ? width() : 2 * width()});
    if (embed_norm_) {
      embed_norm_->forward(ctx, left(num_tokens), normed, 2 * width());
      aux_hidden_norm_->forward(ctx, right(num_tokens), aux_hidden.x, 2 * width(),
                                aux_hidden.index);
    } else {
      gather_rows(ctx, {.out = right(num_tokens),
                        .x = aux_hidden.x,
                        .index = aux_hidden.index,
                        .out_stride = 2 * width()});
    }
    if (has_bias_) gather_rows(ctx, {.out = hidden, .x = bias_, .index = zeros_});
    GemmQueue gemms(ctx, step.phase);
    const Context& queued = gemms.context();
    fc_->forward(queued, step.phase, hidden, both(num_tokens), 1, has_bias_ ? 1 : 0);
    for (const auto& [blocks, attention_norm, mlp_norm] : layers_) {
      if (attention_norm) attention_norm->forward(queued, normed, hidden);
      blocks.attention->forward(queued, step, hidden, attention_norm ? normed : hidden);
      mlp_norm->forward(queued, normed, hidden);
      blocks.mlp->forward(queued, step, hidden, normed);
    }
    gemms.flush();
    if (final_norm_) final_norm_->forward(ctx, hidden, hidden);
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

  bool has_bias_;  // of fc
  RmsNorm *embed_norm_ = nullptr, *aux_hidden_norm_ = nullptr, *final_norm_ = nullptr;
  std::vector<NormedLayer> layers_;
  MemoryPlan::Id bias_id_ = 0, zeros_id_ = 0;
  int* zeros_ = nullptr;
  Tensor bias_;
};

class MtpDrafter : public EagleDrafter {
 public:
  MtpDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : EagleDrafter(spec, target, "MTP", {.input = true, .first_attention = true, .final = true}) {
    spec_.options.check_known("an MTP head", {"vocab_ids"});
    CHECK(model().num_hidden_layers == 1, "an MTP head has {} layers, expected 1",
          model().num_hidden_layers);
  }
};

REGISTER_DRAFTER("eagle", EagleDrafter);
REGISTER_DRAFTER("mtp", MtpDrafter);

}  // namespace
}  // namespace cpmcu
