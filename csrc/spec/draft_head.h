// The output side of a draft: a head of its own, the target's, or FR-Spec's choice of the target's
// rows (Zhao et al., arXiv:2502.14856): the draft proposes only frequent tokens, the target still
// verifies with its whole vocabulary.
//
// How it is stored is the linear method of "draft.lm_head": a quantised head changes what is
// drafted, never what is said.
#pragma once

#include <memory>

#include "linear/linear.h"
#include "spec/drafter.h"

namespace cpmcu {

class DraftHead {
 public:
  DraftHead(const DrafterSpec& spec, const ModelSpec& target);

  void plan(MemoryPlan& plan, const StepLimits& limits);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table);  // "draft.lm_head", if it has its own
  void finish_loading(const Context& ctx, const TargetParts& target);

  // Logits [R, draft vocabulary] float32 of hidden [R, H].
  Tensor forward(const Context& ctx, const Tensor& hidden) const;

 private:
  const DrafterSpec& spec_;
  int64_t vocab_size_;
  std::unique_ptr<LinearMethod> linear_;  // null: the target's head as it is
  TargetParts target_;
  MemoryPlan::Id logits_id_ = 0;
  int64_t max_rows_ = 0;
  Tensor logits_;  // [R, draft vocabulary] float32
};

}  // namespace cpmcu
