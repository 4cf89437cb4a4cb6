// The one forward pass: embed, blocks, norm, head. It walks the spec's blocks and knows none of
// them.
#pragma once

#include <memory>
#include <vector>

#include "layers/block.h"
#include "layers/norm.h"
#include "linear/gemm_queue.h"
#include "linear/linear.h"

namespace cpmcu {

class Transformer {
 public:
  // `prefix` goes before every checkpoint name. `window`: what attention blocks see that say
  // nothing themselves; 0: all.
  explicit Transformer(const ModelSpec& spec, std::string prefix = "", int window = 0);

  // What a drafter wants to see of every row: the residual stream entering these layers, side by
  // side, [T, layers * H]. Before `plan`.
  void keep_aux_hidden(std::vector<int> layers) { aux_hidden_layers_ = std::move(layers); }

  // `max_head_rows`: rows whose hidden states `head` keeps; `max_logit_rows`: of one call.
  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits, int max_head_rows,
            int max_logit_rows);
  void bind(const Arena& arena, const ModelState& state);
  void list_tensors(WeightTable& table);
  void finish_loading(const Context& ctx);

  // Embeds the step's ids and runs all layers; their keys and values go into the state.
  // Returns the residual stream [T, H] before the final norm.
  Tensor forward(const Context& ctx, const Step& step) const;
  // After a decode step: every block commits what was accepted.
  void commit(const Context& ctx, const Step& step, const Accepted& accepted) const;
  // Logits [R, V] float32 of rows [R, H] of the residual stream, R <= max_logit_rows. Their final
  // hidden states are kept as rows first_row, first_row + 1, … of `final_hidden`.
  Tensor head(const Context& ctx, const Tensor& rows, int first_row = 0) const;
  // logits [R, V] float32 = scale * normed [R, H] times the head.
  void project(const Context& ctx, const Tensor& logits, const Tensor& normed, float scale) const;
  // What `forward` returned last, [T, H].
  Tensor hidden(int num_rows) const { return hidden_.rows(0, num_rows); }
  // Hidden states after the final norm, as `head` kept them, [R, H].
  Tensor final_hidden(int num_rows) const { return head_in_.rows(0, num_rows); }
  int max_logit_rows() const { return static_cast<int>(logits_.size(0)); }
  // What `head` wrote last, [R, V].
  Tensor logits(int num_rows) const { return logits_.rows(0, num_rows); }
  // Writes rows [T, H] of the residual stream after the final norm to out.
  void final_norm(const Context& ctx, const Tensor& out, const Tensor& rows) const {
    final_norm_.forward(ctx, out, rows);
  }
  Tensor aux_hidden(int num_rows) const { return aux_hidden_.rows(0, num_rows); }  // [T, layers * H]
  const Tensor& embedding_table() const { return embed_; }               // [V, H]
  // [V, H] until the first step; empty if the checkpoint has the head quantised.
  Tensor head_weight() const {
    return head_ && !spec_.tie_word_embeddings ? head_->dense_weight() : embed_;
  }

 private:
  void copy_aux_hidden(const Context& ctx, int layer, const Tensor& hidden) const;

  struct Sublayer {
    int layer;
    RmsNorm norm;
    std::unique_ptr<Block> block;
  };

  const ModelSpec& spec_;
  std::string prefix_;
  std::vector<int> aux_hidden_layers_;
  std::vector<Sublayer> sublayers_;
  RmsNorm final_norm_;
  std::unique_ptr<LinearMethod> head_;  // null: tied, the embedding table serves
  MemoryPlan::Id embed_id_ = 0, hidden_id_ = 0, normed_id_ = 0, aux_hidden_id_ = 0, head_in_id_ = 0,
                 logits_id_ = 0;
  int64_t max_tokens_ = 0, max_head_rows_ = 0, max_logit_rows_ = 0;
  Tensor embed_;    // [V, H]
  Tensor hidden_;   // [T, H]
  Tensor normed_;   // [T, H]
  Tensor aux_hidden_;     // [T, layers * H]
  Tensor head_in_;  // [head rows, H]
  Tensor logits_;   // [R, V] float32

  mutable std::vector<W4Weight> gemm_order_;  // see GemmQueue
};

}  // namespace cpmcu
