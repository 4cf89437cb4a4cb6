#include "spec/draft_head.h"

namespace cpmcu {
namespace {

constexpr const char* kName = "draft.lm_head";

}  // namespace

DraftHead::DraftHead(const DrafterSpec& spec, const ModelSpec& target)
    : spec_(spec),
      vocab_size_(spec.vocab_ids.empty() ? target.vocab_size
                                         : static_cast<int64_t>(spec.vocab_ids.size())) {
  const ModelSpec& model = spec.model;
  if (spec.own_head || !spec.vocab_ids.empty() || model.quantises(kName)) {
    linear_ = make_linear(model.linear_method_of(kName), {.parts = {{kName, vocab_size_}},
                                                          .in_features = model.hidden_size,
                                                          .dtype = model.dtype,
                                                          .options = model.linear_options,
                                                          .has_tensors = spec.own_head});
  }
}

void DraftHead::plan(MemoryPlan& plan, const StepLimits& limits) {
  max_rows_ = limits.max_decode_rows;
  if (linear_) linear_->plan(plan, limits);
  logits_id_ = plan.add_scratch("draft.logits", 4 * max_rows_ * vocab_size_, 0, kSample);
}

void DraftHead::bind(const Arena& arena) {
  if (linear_) linear_->bind(arena);
  logits_ = arena.tensor(logits_id_, DType::kF32, {max_rows_, vocab_size_});
}

void DraftHead::list_tensors(WeightTable& table) {
  if (spec_.own_head) linear_->list_tensors(table);
}

void DraftHead::finish_loading(const Context& ctx, const TargetParts& target) {
  target_ = target;
  if (linear_ == nullptr) return;
  if (spec_.own_head) {
    linear_->finish_loading(ctx);
    return;
  }
  CHECK(!target.head_weight.empty(),
        "the draft takes rows of the target's lm_head, which the checkpoint stores quantised; "
        "expected a dense lm_head");
  if (spec_.vocab_ids.empty()) {
    linear_->load_rows(ctx, target.head_weight, nullptr);
    return;
  }
  const auto bytes = static_cast<int64_t>(4 * spec_.vocab_ids.size());
  void* index = allocate(ctx.device, bytes);
  copy_to_device(ctx.device, index, spec_.vocab_ids.data(), bytes, ctx.stream);
  linear_->load_rows(ctx, target.head_weight, static_cast<int*>(index));
  synchronize(ctx.device, ctx.stream);
  release(ctx.device, index);
}

Tensor DraftHead::forward(const Context& ctx, const Tensor& hidden) const {
  const Tensor logits = logits_.rows(0, hidden.size(0));
  const float scale = spec_.model.logit_scale;
  if (linear_) {
    linear_->forward(ctx, Phase::kDecode, logits, hidden, scale, 0);
  } else {
    target_.project(ctx, logits, hidden, scale);
  }
  return logits;
}

}  // namespace cpmcu
