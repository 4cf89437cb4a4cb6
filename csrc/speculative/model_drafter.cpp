#include "speculative/model_drafter.h"

#include <algorithm>

namespace cpmcu {

ModelDrafter::ModelDrafter(const DrafterSpec& spec, const ModelSpec& target)
    : BeamDrafter(spec, target) {
  CHECK(model().vocab_size == target.vocab_size,
        "the draft model has a vocabulary of {}, the target {}: they must share the tokenizer",
        model().vocab_size, target.vocab_size);
  model_.emplace(model(), spec_.scope, spec_.options.integer("window", 0));
}

int ModelDrafter::most_head_rows() const { return limits_.max_seqs * topk_; }

void ModelDrafter::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  BeamDrafter::plan(plan, states, limits);
  // `head` is called once for all branches.
  const int branches = limits.max_seqs * topk_, rows = most_head_rows();
  model_->plan(plan, state(), step_limits(), rows,
               std::max(branches, std::min(rows, kMaxLogitRows)));
}

void ModelDrafter::bind(const Arena& arena) {
  BeamDrafter::bind(arena);
  model_->bind(arena, state());
}

void ModelDrafter::list_tensors(WeightTable& table) { model_->list_tensors(table); }

void ModelDrafter::finish_loading(const Context& ctx, const TargetParts& target) {
  BeamDrafter::finish_loading(ctx, target);
  model_->finish_loading(ctx);
}

Tensor ModelDrafter::forward(const Context& ctx, const Step& step, const HiddenRows&, Source) {
  return model_->forward(ctx, step);
}

Tensor ModelDrafter::head(const Context& ctx, const Tensor& hidden) {
  return model_->head(ctx, hidden);
}

}  // namespace cpmcu
