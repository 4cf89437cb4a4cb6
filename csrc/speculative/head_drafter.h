// A head of the EAGLE family: an fc layer over the target's hidden states, decoder blocks, and an
// output head, which drafts level by level. A derived drafter adds norms and layers (HeadParts),
// and connects them in `forward` and `head`.
#pragma once

#include <string>

#include "speculative/beam_drafter.h"
#include "speculative/head_parts.h"

namespace cpmcu {

class HeadDrafter : public BeamDrafter {
 public:
  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void list_tensors(WeightTable& table) override { parts_.list_tensors(table); }
  void finish_loading(const Context& ctx, const TargetParts& target) override;

 protected:
  // `kind` appears in messages.
  HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind);

  // HeadParts::add_layer; the attention has the window of the options.
  HeadParts::Layer add_layer(const std::string& prefix, int in_features = 0,
                             LayerSpec layer = {{"attention"}, {"mlp"}});

  bool shifted() const override { return true; }

  // Input of fc or of the first layer, [T, 2 H]. Left and right are its halves.
  Tensor both(int num_tokens) const { return both_.rows(0, num_tokens); }
  Value both_value(OpList& ops) const { return ops.value("concat", both_); }
  Tensor left(int num_tokens) const { return half(num_tokens, 0); }
  Tensor right(int num_tokens) const { return half(num_tokens, width()); }
  int64_t width() const { return parts_.width(); }  // H

  HeadParts parts_;

 private:
  Tensor half(int num_tokens, int64_t first_column) const;

  MemoryPlan::Id both_id_ = 0;
  Tensor both_;
};

}  // namespace cpmcu
