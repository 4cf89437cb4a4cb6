// The output side of a draft: a head of its own, the target's, or FR-Spec's choice of the target's
// rows (Zhao et al., arXiv:2502.14856): the draft proposes only frequent tokens, the target still
// verifies with its whole vocabulary.
#pragma once

#include "spec/drafter.h"

namespace cpmcu {

class DraftHead {
 public:
  DraftHead(const DrafterSpec& spec, const ModelSpec& target) : spec_(spec), target_(target) {}

  void plan(MemoryPlan& plan, int max_rows);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table);  // "draft.lm_head.weight", if it has its own
  void finish_loading(const Context& ctx, const TargetParts& target);

  // Logits [R, draft vocabulary] float32 of hidden [R, H].
  Tensor forward(const Context& ctx, const Tensor& hidden) const;

 private:
  int64_t vocab_size() const;

  const DrafterSpec& spec_;
  const ModelSpec& target_;
  MemoryPlan::Id weight_id_ = 0, logits_id_ = 0;
  int64_t max_rows_ = 0;
  Tensor weight_;  // [draft vocabulary, H]
  Tensor logits_;  // [R, draft vocabulary] float32
};

}  // namespace cpmcu
