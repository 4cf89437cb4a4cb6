// The parts of a draft head: layers over the target's hidden states, and an output head. This class
// owns them and the buffers of a step. A drafter adds the parts in its constructor.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/block.h"
#include "layers/norm.h"
#include "linear/linear.h"
#include "pass/replay.h"
#include "speculative/draft_head.h"

namespace cpmcu {

class HeadParts {
 public:
  struct Layer {
    Block* attention;
    Block* mlp;
  };

  // `spec` and `vocab_ids` must outlive this object; `kind` appears in messages. Throws unless the
  // head has the target's hidden size.
  HeadParts(const DrafterSpec& spec, const std::vector<int>& vocab_ids, const ModelSpec& target,
            const std::string& kind);

  // ---- parts
  // The two blocks of `layer`. The first has `in_features` input columns (0: hidden_size). Without
  // `adds` a block overwrites its result, as in BlockConfig.
  Layer add_layer(const std::string& prefix, const LayerSpec& layer, int in_features = 0,
                  bool adds = true);
  // `size`: elements of a row; 0: hidden_size.
  RmsNorm* add_norm(const std::string& name, int64_t size = 0);
  // A linear layer; `out_features` 0: hidden_size.
  LinearMethod* add_linear(const std::string& name, int64_t in_features, int64_t out_features = 0);

  // A linear layer of a draft, by its name in the engine.
  static std::unique_ptr<LinearMethod> make_layer(const ModelSpec& model, const std::string& name,
                                                  int64_t in_features, int64_t out_features);

  // ---- set-up. `limits` are for the head's own steps, `max_logit_rows` for DraftHead::forward.
  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits, int max_logit_rows);
  void bind(const Arena& arena, const ModelState& state);
  void list_tensors(WeightTable& table);
  void finish_loading(const Context& ctx, const TargetParts& target);

  // ---- buffers of a step, [T, H] each
  Tensor hidden(int num_tokens) const { return hidden_.rows(0, num_tokens); }
  Tensor normed(int num_tokens) const { return normed_.rows(0, num_tokens); }
  // The same buffers as values of a pass.
  Value hidden_value(OpList& ops) const { return ops.value("hidden", hidden_); }
  Value normed_value(OpList& ops) const { return ops.value("normed", normed_); }
  // A draft's launches load no weights of the next launch to L2.
  static CutTarget cut_target(const Context& ctx) {
    CutTarget target = CutTarget::of(ctx);
    target.prefetches = false;
    return target;
  }

  const DraftHead& output() const { return head_; }
  const Tensor& embedding_table() const { return embedding_table_; }
  int64_t width() const { return model_.hidden_size; }  // H
  int64_t max_tokens() const { return max_tokens_; }

 private:
  const std::string& scope_;
  const ModelSpec& model_;  // the spec of the draft's own layers
  DraftHead head_;
  Tensor embedding_table_;
  std::vector<std::unique_ptr<LinearMethod>> linears_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<RmsNorm>> norms_;
  int64_t max_tokens_ = 0;
  MemoryPlan::Id hidden_id_ = 0, normed_id_ = 0;
  Tensor hidden_, normed_;
};

}  // namespace cpmcu
