// A small language model that shares the target's tokenizer: "model". A chain with top-k 1, a tree
// otherwise.
#include <algorithm>
#include <optional>

#include "model/transformer.h"
#include "spec/beam_drafter.h"

namespace cpmcu {
namespace {

class ModelDrafter : public BeamDrafter {
 public:
  ModelDrafter(const DrafterSpec& spec, const ModelSpec& target) : BeamDrafter(spec, target) {
    CHECK(spec_.model.vocab_size == target.vocab_size,
          "the draft model has a vocabulary of {}, the target {}: they must share the tokenizer",
          spec_.model.vocab_size, target.vocab_size);
    CHECK(spec_.vocab_ids.empty(), "a draft model uses its whole vocabulary; FR-Spec is for heads");
  }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    BeamDrafter::plan(plan, limits);
    const int decode_rows = limits.max_seqs * std::max(spec_.depth + 1, spec_.topk);
    model_.emplace(spec_.model, "draft.", limits.first_kv_layer, spec_.window);
    model_->plan(plan,
                 {.max_rows = std::max(limits.max_prompt_rows, decode_rows),
                  .max_decode_rows = decode_rows,
                  .max_model_len = limits.max_model_len,
                  .compute_capability = limits.compute_capability},
                 decode_rows);
  }
  void bind(const Arena& arena) override {
    BeamDrafter::bind(arena);
    model_->bind(arena);
  }
  void list_tensors(WeightTable& table) override { model_->list_tensors(table); }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BeamDrafter::finish_loading(ctx, target);
    model_->finish_loading(ctx);
  }

 protected:
  Tensor forward(const Context& ctx, const Step& step, const Features&, Source,
                 const KvCache& cache) override {
    return model_->forward(ctx, step, cache);
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
