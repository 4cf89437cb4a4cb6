// A head of the EAGLE family: an fc layer over the target's hidden states, decoder blocks, and an
// output head. This class owns these parts and their buffers. A derived drafter adds norms and
// layers, and connects them in `forward` and `head`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/block.h"
#include "layers/norm.h"
#include "linear/linear.h"
#include "pass/replay.h"
#include "speculative/beam_drafter.h"
#include "speculative/draft_head.h"

namespace cpmcu {

class HeadDrafter : public BeamDrafter {
 public:
  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void list_tensors(WeightTable& table) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;

 protected:
  struct Layer {
    Block* attention;
    Block* mlp;
  };

  // `kind` appears in messages.
  HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind);

  // The parts of the head, to be added in the constructor. `add_layer` adds the two blocks of
  // `layer`; the first has `in_features` input columns (0: hidden_size).
  Layer add_layer(const std::string& prefix, int in_features = 0,
                  const LayerSpec& layer = {{"attention"}, {"mlp"}});
  // `size`: elements of a row; 0: hidden_size.
  RmsNorm* add_norm(const std::string& name, int64_t size = 0);
  // A linear layer from `in_features` to hidden_size.
  LinearMethod* add_fc(const std::string& name, int64_t in_features);

  bool shifted() const override { return true; }

  // Buffers of a step, [T, H] each; left and right are the halves of `both` [T, 2 H].
  Tensor hidden(int num_tokens) const { return hidden_.rows(0, num_tokens); }
  Tensor normed(int num_tokens) const { return normed_.rows(0, num_tokens); }
  Tensor both(int num_tokens) const { return both_.rows(0, num_tokens); }
  // The same buffers as values of a pass.
  Value hidden_value(OpList& ops) const { return ops.value("hidden", hidden_); }
  Value normed_value(OpList& ops) const { return ops.value("normed", normed_); }
  Value both_value(OpList& ops) const { return ops.value("concat", both_); }
  // A draft's launches load no weights of the next launch to L2.
  static CutTarget cut_target(const Context& ctx) {
    CutTarget target = CutTarget::of(ctx);
    target.prefetches = false;
    return target;
  }
  Tensor left(int num_tokens) const { return half(num_tokens, 0); }
  Tensor right(int num_tokens) const { return half(num_tokens, width()); }
  int64_t width() const { return model().hidden_size; }  // H
  int64_t max_tokens() const { return max_tokens_; }

  DraftHead head_;
  Tensor embedding_table_;

 private:
  Tensor half(int num_tokens, int64_t first_column) const;

  std::vector<std::unique_ptr<LinearMethod>> fcs_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<RmsNorm>> norms_;
  int64_t max_tokens_ = 0;
  MemoryPlan::Id both_id_ = 0, hidden_id_ = 0, normed_id_ = 0;
  Tensor both_, hidden_, normed_;
};

}  // namespace cpmcu
