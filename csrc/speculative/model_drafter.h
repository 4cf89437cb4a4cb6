// A drafter that is a language model with the target's tokenizer.
#pragma once

#include <optional>

#include "model/transformer.h"
#include "speculative/beam_drafter.h"

namespace cpmcu {

class ModelDrafter : public BeamDrafter {
 public:
  ModelDrafter(const DrafterSpec& spec, const ModelSpec& target);

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void list_tensors(WeightTable& table) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;

 protected:
  Tensor forward(const Context& ctx, const Step& step, const HiddenRows&, Source) override;
  Tensor head(const Context& ctx, const Tensor& hidden) override;
  bool shifted() const override { return false; }

  Transformer& language_model() { return *model_; }
  // Maximum number of rows of a pass whose logits are computed.
  virtual int most_head_rows() const;

 private:
  std::optional<Transformer> model_;
};

}  // namespace cpmcu
