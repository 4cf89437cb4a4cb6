// A small language model with the target's tokenizer: "model". If top-k is 1 it drafts a chain,
// otherwise a tree.
#include <optional>

#include "model/transformer.h"
#include "speculative/beam_drafter.h"

namespace cpmcu {
namespace {

class ModelDrafter : public BeamDrafter {
 public:
  ModelDrafter(const DrafterSpec& spec, const ModelSpec& target) : BeamDrafter(spec, target) {
    spec_.options.check_known("a draft model", {"window"});
    CHECK(model().vocab_size == target.vocab_size,
          "the draft model has a vocabulary of {}, the target {}: they must share the tokenizer",
          model().vocab_size, target.vocab_size);
    model_.emplace(model(), spec_.scope, spec_.options.integer("window", 0));
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BeamDrafter::plan(plan, states, limits);
    const StepLimits step = step_limits();
    const int head_rows = limits.max_seqs * spec_.topk;
    model_->plan(plan, state(), step, head_rows, head_rows);
  }
  void bind(const Arena& arena) override {
    BeamDrafter::bind(arena);
    model_->bind(arena, state());
  }
  void list_tensors(WeightTable& table) override { model_->list_tensors(table); }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BeamDrafter::finish_loading(ctx, target);
    model_->finish_loading(ctx);
  }

 protected:
  Tensor forward(const Context& ctx, const Step& step, const HiddenRows&, Source) override {
    return model_->forward(ctx, step);
  }
  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return model_->head(ctx, hidden);
  }
  bool shifted() const override { return false; }

 private:
  std::optional<Transformer> model_;
};

REGISTER_DRAFTER("model", ModelDrafter);

}  // namespace
}  // namespace cpmcu
