#include "spec/draft_head.h"

#include "kernels/gather_rows.h"
#include "kernels/gemm/gemm.h"

namespace cpmcu {

int64_t DraftHead::vocab_size() const {
  return spec_.vocab_ids.empty() ? target_.vocab_size
                                 : static_cast<int64_t>(spec_.vocab_ids.size());
}

void DraftHead::plan(MemoryPlan& plan, int max_rows) {
  max_rows_ = max_rows;
  const bool has_rows = spec_.own_head || !spec_.vocab_ids.empty();
  weight_id_ =
      plan.add("draft.lm_head", "weights",
               has_rows ? vocab_size() * spec_.model.hidden_size * size_of(spec_.model.dtype) : 0);
  logits_id_ = plan.add_scratch("draft.logits", 4 * max_rows * vocab_size(), 0, kSample);
}

void DraftHead::bind(const Arena& arena) {
  if (spec_.own_head || !spec_.vocab_ids.empty()) {
    weight_ = arena.tensor(weight_id_, spec_.model.dtype, {vocab_size(), spec_.model.hidden_size});
  }
  logits_ = arena.tensor(logits_id_, DType::kF32, {max_rows_, vocab_size()});
}

void DraftHead::list_tensors(WeightTable& table) {
  if (spec_.own_head) table.add("draft.lm_head.weight", weight_);
}

void DraftHead::finish_loading(const Context& ctx, const TargetParts& target) {
  if (spec_.own_head) return;
  CHECK(!target.head_weight.empty(),
        "the draft shares the target's lm_head, which is quantised; that is not supported");
  if (spec_.vocab_ids.empty()) {
    weight_ = target.head_weight;
    return;
  }
  const auto bytes = static_cast<int64_t>(4 * spec_.vocab_ids.size());
  void* index = allocate(ctx.device, bytes);
  copy_to_device(ctx.device, index, spec_.vocab_ids.data(), bytes, ctx.stream);
  gather_rows(ctx, {.out = weight_, .x = target.head_weight, .index = static_cast<int*>(index)});
  synchronize(ctx.device, ctx.stream);
  release(ctx.device, index);
}

Tensor DraftHead::forward(const Context& ctx, const Tensor& hidden) const {
  const Tensor logits = logits_.rows(0, hidden.size(0));
  skinny_gemm(ctx, {.y = logits, .x = hidden, .w = weight_, .alpha = spec_.model.logit_scale});
  return logits;
}

}  // namespace cpmcu
