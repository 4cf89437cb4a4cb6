#include "speculative/draft_head.h"

namespace cpmcu {

DraftHead::DraftHead(const DrafterSpec& spec, const std::vector<int>& vocab_ids,
                     const ModelSpec& target)
    : model_(*spec.model),
      vocab_ids_(vocab_ids),
      is_own_(spec.options.flag("own_head", false)),
      vocab_size_(vocab_ids.empty() ? target.vocab_size : static_cast<int64_t>(vocab_ids.size())) {
  const std::string name = spec.scope + "lm_head";
  if (is_own_ || !vocab_ids.empty() || model_.quantises(name)) {
    linear_ = make_linear(model_.linear_method_of(name), {.parts = {{name, vocab_size_}},
                                                          .in_features = model_.hidden_size,
                                                          .dtype = model_.dtype,
                                                          .options = model_.linear_options_of(name),
                                                          .has_tensors = is_own_});
  }
}

void DraftHead::plan(MemoryPlan& plan, const StepLimits& limits) {
  max_rows_ = limits.max_decode_tokens;
  if (linear_) linear_->plan(plan, limits);
  logits_id_ = plan.add_scratch("draft.logits", 4 * max_rows_ * vocab_size_, kHead, kSample);
}

void DraftHead::bind(const Arena& arena) {
  if (linear_) linear_->bind(arena);
  logits_ = arena.tensor(logits_id_, DType::kF32, {max_rows_, vocab_size_});
}

void DraftHead::list_tensors(WeightTable& table) {
  if (is_own_) linear_->list_tensors(table);
}

void DraftHead::finish_loading(const Context& ctx, const TargetParts& target) {
  target_ = target;
  if (linear_ == nullptr) return;
  if (is_own_) {
    linear_->finish_loading(ctx);
    return;
  }
  CHECK(!target.head_weight.empty(),
        "the draft copies rows of the target's lm_head, which the checkpoint stores quantised; "
        "expected a dense lm_head");
  if (vocab_ids_.empty()) {
    linear_->load_rows(ctx, target.head_weight, nullptr);
    return;
  }
  const auto bytes = static_cast<int64_t>(4 * vocab_ids_.size());
  void* index = allocate(ctx.device, bytes);
  copy_to_device(ctx.device, index, vocab_ids_.data(), bytes, ctx.stream);
  linear_->load_rows(ctx, target.head_weight, static_cast<int*>(index));
  synchronize(ctx.device, ctx.stream);
  release(ctx.device, index);
}

Tensor DraftHead::forward(const Context& ctx, const Tensor& hidden) const {
  const Tensor logits = logits_.rows(0, hidden.size(0));
  const float scale = model_.logit_scale;
  if (linear_) {
    linear_->forward(ctx, Phase::kDecode, logits, hidden, scale, 0);
  } else {
    target_.project(ctx, logits, hidden, scale);
  }
  return logits;
}

}  // namespace cpmcu
