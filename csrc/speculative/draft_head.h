// The output side of a draft: a head of its own, the target's, or FR-Spec's choice of the target's
// rows (Zhao et al., arXiv:2502.14856): the draft proposes only frequent tokens, the target still
// verifies with its whole vocabulary.
//
// The linear method of "<scope>lm_head" says how it is stored: a quantised head changes the draft,
// never the text.
#pragma once

#include <memory>

#include "linear/linear.h"
#include "speculative/drafter.h"

namespace cpmcu {

class DraftHead {
 public:
  // `vocab_ids`: target ids of the draft vocabulary; empty: the target's. Both must outlive it.
  DraftHead(const DrafterSpec& spec, const std::vector<int>& vocab_ids, const ModelSpec& target);

  void plan(MemoryPlan& plan, const StepLimits& limits);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table);  // its own lm_head, if it has one
  void finish_loading(const Context& ctx, const TargetParts& target);

  // Logits [R, draft vocabulary] float32 of hidden [R, H].
  Tensor forward(const Context& ctx, const Tensor& hidden) const;

 private:
  const ModelSpec& model_;  // the draft's own layers
  const std::vector<int>& vocab_ids_;
  bool is_own_;  // the checkpoint has it
  int64_t vocab_size_;
  std::unique_ptr<LinearMethod> linear_;  // null: the target's head as it is
  TargetParts target_;
  MemoryPlan::Id logits_id_ = 0;
  int64_t max_rows_ = 0;
  Tensor logits_;  // [R, draft vocabulary] float32
};

}  // namespace cpmcu
