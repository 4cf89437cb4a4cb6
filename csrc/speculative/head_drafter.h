// A head of the EAGLE family: fc of the target's hidden states, decoder blocks, logits. It owns
// their parts and the buffers. A drafter adds its norms and layers, and says how they are put
// together (`forward`, `head`).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/block.h"
#include "layers/norm.h"
#include "linear/linear.h"
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

  // `kind` is for messages; fc has `fc_inputs` columns.
  HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
              int64_t fc_inputs);

  // Attention of `in_features` columns (0: hidden_size) and an MLP. In the constructor.
  Layer add_layer(const std::string& prefix, int in_features = 0);
  RmsNorm* add_norm(const std::string& name);

  bool shifted() const override { return true; }

  // Buffers of a step, [rows, H] each; left and right are the halves of `both` [rows, 2 H].
  Tensor hidden(int rows) const { return hidden_.rows(0, rows); }
  Tensor normed(int rows) const { return normed_.rows(0, rows); }
  Tensor both(int rows) const { return both_.rows(0, rows); }
  Tensor left(int rows) const { return half(rows, 0); }
  Tensor right(int rows) const { return half(rows, width()); }
  int64_t width() const { return model().hidden_size; }  // H
  int64_t max_tokens() const { return max_tokens_; }

  std::unique_ptr<LinearMethod> fc_;
  DraftHead head_;
  Tensor embedding_table_;

 private:
  Tensor half(int rows, int64_t first_column) const;

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<RmsNorm>> norms_;
  int64_t max_tokens_ = 0;
  MemoryPlan::Id both_id_ = 0, hidden_id_ = 0, normed_id_ = 0;
  Tensor both_, hidden_, normed_;
};

}  // namespace cpmcu
