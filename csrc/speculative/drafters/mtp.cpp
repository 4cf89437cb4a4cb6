// Multi-token prediction head of Qwen3-Next and Qwen3.5, one module that runs once for each level:
// "mtp".
//
//   x = fc [norm(embedding(id)) | norm(aux_hidden)]
//   hidden = norm(decoder layer(x)); logits = the target's lm_head of hidden
//
// `aux_hidden` is the target's final hidden state of the preceding token, after the final norm. For
// a drafted token it is the draft's `hidden` of the parent token.
// Source: DeepSeek-AI, arXiv:2412.19437, section 2.2.
#include "kernels/layer/embedding.h"
#include "linear/gemm_queue.h"
#include "speculative/head_drafter.h"

namespace cpmcu {
namespace {

class MtpDrafter : public HeadDrafter {
 public:
  MtpDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : HeadDrafter(spec, target, "MTP", 2 * spec.model->hidden_size) {
    spec_.options.check_known("an MTP head", {"vocab_ids"});
    CHECK(model().num_hidden_layers == 1, "an MTP head has {} layers, expected 1",
          model().num_hidden_layers);
    const std::string prefix = spec_.scope + "layers.0.";
    layer_ = add_layer(prefix, 0, model().layer(0));
    embed_norm_ = add_norm(spec_.scope + "input_norm1");
    aux_hidden_norm_ = add_norm(spec_.scope + "input_norm2");
    attention_norm_ = add_norm(prefix + "input_layernorm");
    mlp_norm_ = add_norm(prefix + "post_attention_layernorm");
    final_norm_ = add_norm(spec_.scope + "norm");
  }

  HiddenNeeds needs() const override { return {.final = true}; }

 protected:
  Tensor select_hidden(const HiddenStates& states) const override { return states.final; }

  Tensor forward(const Context& ctx, const Step& step, const HiddenRows& aux_hidden,
                 Source) override {
    const int num_tokens = step.tokens.num_tokens;
    const Tensor hidden = this->hidden(num_tokens), normed = this->normed(num_tokens);
    embedding(
        ctx,
        {.out = normed, .table = embedding_table_, .ids = step.ids, .scale = model().embed_scale});
    embed_norm_->forward(ctx, left(num_tokens), normed, 2 * width());
    aux_hidden_norm_->forward(ctx, right(num_tokens), aux_hidden.x, 2 * width(), aux_hidden.index);
    GemmQueue gemms(ctx, step.phase);
    const Context& queued = gemms.context();
    fc_->forward(queued, step.phase, hidden, both(num_tokens), 1, 0);
    attention_norm_->forward(queued, normed, hidden);
    layer_.attention->forward(queued, step, hidden, normed);
    mlp_norm_->forward(queued, normed, hidden);
    layer_.mlp->forward(queued, step, hidden, normed);
    gemms.flush();
    final_norm_->forward(ctx, hidden, hidden);
    return hidden;
  }

  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return head_.forward(ctx, hidden);
  }

 private:
  Layer layer_{};
  RmsNorm *embed_norm_, *aux_hidden_norm_, *attention_norm_, *mlp_norm_, *final_norm_;
};

REGISTER_DRAFTER("mtp", MtpDrafter);

}  // namespace
}  // namespace cpmcu
