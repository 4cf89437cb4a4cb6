// The forward pass: embedding, blocks, final norm, head. It runs the blocks that the spec lists and
// has no code for a particular kind of block.
#pragma once

#include <memory>
#include <vector>

#include "layers/block.h"
#include "layers/norm.h"
#include "layers/sublayer.h"
#include "linear/linear.h"
#include "pass/replay.h"

namespace cpmcu {

// Maximum rows of one call of the head. A pass with more rows computes its logits in parts.
constexpr int kMaxLogitRows = 256;

class Transformer {
 public:
  // `prefix` precedes every checkpoint name. `window`: default window of the attention blocks; 0:
  // no window.
  explicit Transformer(const ModelSpec& spec, std::string prefix = "", int window = 0);

  // Makes `forward` keep the auxiliary hidden states of a drafter: the residual stream entering
  // each of these layers, concatenated to [T, layers * H]. Call it before `plan`.
  void keep_aux_hidden(std::vector<int> layers) { aux_hidden_layers_ = std::move(layers); }

  // `max_head_rows`: rows of `final_hidden`; `max_logit_rows`: rows of one call of `head`.
  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits, int max_head_rows,
            int max_logit_rows);
  void bind(const Arena& arena, const ModelState& state);
  void list_tensors(WeightTable& table);
  void finish_loading(const Context& ctx);

  // Embeds the step's ids and runs all layers, which write their keys and values to the state.
  // Returns the residual stream [T, H] before the final norm.
  Tensor forward(const Context& ctx, const Step& step) const {
    pass_.replay(ctx, step);
    return hidden(step.tokens.num_tokens);
  }
  // After a decode step: every block commits the accepted tokens of the step.
  void commit(const Context& ctx, const Step& step) const { commit_.replay(ctx, step); }
  // Returns logits [R, V] float32 of `rows` [R, H] of the residual stream, R <= max_logit_rows. The
  // rows after the final norm become rows first_row, first_row + 1, … of `final_hidden`.
  Tensor head(const Context& ctx, const Tensor& rows, int first_row = 0) const;
  // logits [R, V] float32 = scale * normed [R, H] times the head.
  void project(const Context& ctx, const Tensor& logits, const Tensor& normed, float scale) const;
  // The last result of `forward`, [T, H].
  Tensor hidden(int num_tokens) const { return hidden_.rows(0, num_tokens); }
  // Hidden states after the final norm, written by `head`, [R, H].
  Tensor final_hidden(int num_rows) const { return head_in_.rows(0, num_rows); }
  int max_logit_rows() const { return static_cast<int>(logits_.size(0)); }
  // The last result of `head`, [R, V].
  Tensor logits(int num_rows) const { return logits_.rows(0, num_rows); }
  // out [T, H] = final norm of rows [T, H] of the residual stream.
  void final_norm(const Context& ctx, const Tensor& out, const Tensor& rows) const {
    final_norm_.forward(ctx, out, rows);
  }
  // The auxiliary hidden states of the last `forward`, [T, layers * H].
  Tensor aux_hidden(int num_tokens) const { return aux_hidden_.rows(0, num_tokens); }
  const Tensor& embedding_table() const { return embed_; }  // [V, H]
  // The launches of a pass, for this device or another.
  std::vector<LaunchRow> launches(Phase phase, const CutTarget& target) const {
    return launch_rows(pass_.of(phase).ops(), target);
  }
  // Cuts the pass for another device than the one it runs on; for tests.
  void cut(const CutTarget& target) { pass_.cut(target); }
  // [V, H], valid until the first step; empty if the checkpoint's head is quantised.
  Tensor head_weight() const {
    return head_ && !spec_.tie_word_embeddings ? head_->dense_weight() : embed_;
  }

 private:
  bool divides_head() const;
  void append(OpList& ops) const;
  RunOp copy_aux_hidden(int layer, const Value& hidden) const;

  const ModelSpec& spec_;
  std::string prefix_;
  std::vector<int> aux_hidden_layers_;
  std::vector<Sublayer> sublayers_;
  bool has_branch_ = false;  // a sublayer has a norm of its output
  RmsNorm final_norm_;
  std::unique_ptr<LinearMethod> head_;  // null: the head is the embedding table
  MemoryPlan::Id embed_id_ = 0, hidden_id_ = 0, normed_id_ = 0, branch_id_ = 0, aux_hidden_id_ = 0,
                 head_in_id_ = 0, logits_id_ = 0, part_id_ = 0, part_logits_id_ = 0;
  int64_t max_tokens_ = 0, max_head_rows_ = 0, max_logit_rows_ = 0;
  Tensor embed_;   // [V, H]
  Tensor hidden_;  // [T, H]: the residual stream
  Tensor normed_;  // [T, H]: input of a block, after its norm
  Tensor branch_;  // [T, H]: output of a block that has a norm of its output
  // [R, V / ranks]: logits of this rank's part of the head; empty: the head is whole.
  Tensor part_logits_;
  Tensor part_;        // [T, H]: this rank's part of a block's output; empty: there is one rank
  Tensor aux_hidden_;  // [T, layers * H]: inputs of the layers that the drafter reads
  Tensor head_in_;     // [head rows, H]: hidden states after the final norm
  Tensor logits_;      // [R, V] float32

  Pass pass_;
  Schedule commit_{Phase::kDecode};
};

}  // namespace cpmcu
