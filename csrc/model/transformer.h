// The one forward pass: embed, blocks, norm, head. It walks the spec's blocks and knows none of
// them.
#pragma once

#include <memory>
#include <vector>

#include "layers/block.h"
#include "layers/kv_cache.h"
#include "layers/norm.h"
#include "linear/linear.h"

namespace cpmcu {

class Transformer {
 public:
  explicit Transformer(const ModelSpec& spec);

  void plan(MemoryPlan& plan, const StepLimits& limits, int max_logit_rows);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table);
  void finish_loading(const Context& ctx);

  // Embeds the step's ids and runs all layers; writes their keys and values into the cache.
  // Returns the residual stream [T, H] before the final norm.
  Tensor forward(const Context& ctx, const Step& step, const KvCache& cache) const;
  // Logits [R, V] float32 of rows [R, H] of the residual stream, R <= max_logit_rows.
  Tensor head(const Context& ctx, const Tensor& rows) const;

 private:
  struct Sublayer {
    RmsNorm norm;
    std::unique_ptr<Block> block;
  };

  const ModelSpec& spec_;
  std::vector<Sublayer> sublayers_;
  RmsNorm final_norm_;
  std::unique_ptr<LinearMethod> head_;  // null: tied, the embedding table serves
  MemoryPlan::Id embed_id_ = 0, hidden_id_ = 0, normed_id_ = 0, head_in_id_ = 0, logits_id_ = 0;
  int64_t max_rows_ = 0, max_logit_rows_ = 0;
  Tensor embed_;    // [V, H]
  Tensor hidden_;   // [T, H]
  Tensor normed_;   // [T, H]
  Tensor head_in_;  // [R, H]
  Tensor logits_;   // [R, V] float32
};

}  // namespace cpmcu
