// The output head of a draft. It is the draft's own lm_head, the target's, or a subset of the rows
// of the target's (FR-Spec: Zhao et al., arXiv:2502.14856). With a subset the draft proposes
// frequent tokens only; the target still verifies with its whole vocabulary.
//
// The linear method of "<scope>lm_head" stores it. A quantised head changes the draft, never the
// text.
#pragma once

#include <memory>

#include "linear/linear.h"
#include "speculative/drafter.h"

namespace cpmcu {

class DraftHead {
 public:
  // `vocab_ids`: target ids of the draft vocabulary; empty: the target's vocabulary. `spec` and
  // `vocab_ids` must outlive the head.
  DraftHead(const DrafterSpec& spec, const std::vector<int>& vocab_ids, const ModelSpec& target);

  void plan(MemoryPlan& plan, const StepLimits& limits);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table);  // lists the draft's own lm_head, if it has one
  void finish_loading(const Context& ctx, const TargetParts& target);

  // Logits [R, draft vocabulary] float32 of hidden [R, H].
  Tensor forward(const Context& ctx, const Tensor& hidden) const;

 private:
  const ModelSpec& model_;  // the spec of the draft's own layers
  const std::vector<int>& vocab_ids_;
  bool is_own_;  // true: the draft's checkpoint has an lm_head
  int64_t vocab_size_;
  std::unique_ptr<LinearMethod> linear_;  // null: logits come from the target's head
  TargetParts target_;
  MemoryPlan::Id logits_id_ = 0;
  int64_t max_rows_ = 0;
  Tensor logits_;  // [R, draft vocabulary] float32
};

}  // namespace cpmcu
