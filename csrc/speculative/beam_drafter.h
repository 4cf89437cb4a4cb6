// A drafter that is a network. It processes the accepted tokens, then grows a tree level by level
// (beam search). EAGLE heads and small language models differ in two functions only: `forward` maps
// ids and the target's hidden states to hidden states, `head` maps hidden states to logits.
//
// If a step drafts nothing, the draft's KV entries of its tokens are stale or missing. Acceptance
// drops for a while; the text does not change.
#pragma once

#include <algorithm>

#include "core/carver.h"
#include "speculative/drafter.h"

namespace cpmcu {

class BeamDrafter : public Drafter {
 public:
  // The option "topk", k, is the width of a level; a chain has 1.
  BeamDrafter(const DrafterSpec& spec, const ModelSpec& target);

  DraftShape largest() const override { return largest_; }
  bool fits(const DraftShape& shape) const override {
    return shape.tree_size <= most_nodes(shape.depth);
  }
  std::vector<DraftShape> shapes() const override { return beam_shapes(largest_, topk_); }
  DraftShape shrunk(const DraftShape& limit) const override;
  // KV entries of the accepted tokens, then of the tree's levels. The last level needs none.
  int lookahead(int depth) const override { return depth + 1 + topk_ * (largest_.depth - 1); }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;
  void prefill(const Context& ctx, const DraftPrompt& prompt) override;
  Draft propose(const Context& ctx, const DraftBatch& batch) override;

 protected:
  // Where the hidden state of a token comes from: the target, or the draft's own last level.
  enum class Source { kTarget, kRecycled };

  // Token t of a step reads x[index[t]]; without an index x[t].
  struct HiddenRows {
    Tensor x;  // [rows, F] if the target wrote it, [rows, H] if it is recycled
    const int* index = nullptr;
  };

  // Returns the hidden states [T, H] of the step's tokens, in a buffer of the draft. They are valid
  // in `head` and, as recycled states, in the next call.
  virtual Tensor forward(const Context& ctx, const Step& step, const HiddenRows& hidden,
                         Source source) = 0;
  // Returns logits [T, draft vocabulary] float32.
  virtual Tensor head(const Context& ctx, const Tensor& hidden) = 0;
  // Whether entry t of the draft combines the hidden state of token t with the id of token t + 1
  // (EAGLE).
  virtual bool shifted() const = 0;
  // The hidden states of the target that this drafter reads.
  virtual Tensor select_hidden(const HiddenStates&) const { return {}; }

  const ModelSpec& model() const { return *spec_.model; }  // the draft's own layers
  ModelState& state() { return *state_; }
  // Limits of the draft's own steps.
  StepLimits step_limits() const;
  int max_path() const { return limits_.max_path; }
  // Maximum number of rows of one sequence in a launch of `propose`.
  virtual int most_rows() const { return std::max(max_path(), topk_); }

  // ---- parts of `propose`
  // The width k of a step's levels. If a tree has no more drafted tokens than levels, it is a
  // chain of the likeliest tokens.
  int width_of(const DraftShape& shape) const {
    return shape.tree_size - 1 <= shape.depth ? 1 : topk_;
  }
  DraftBeam beam_of(const DraftBatch& batch) const;
  // The draft's own step over the sequences of `batch`, without its tokens.
  StepTokens step_of(const DraftBatch& batch) const;
  // Runs the draft over the tokens that the last step accepted. Returns the hidden state of the
  // last one of each sequence.
  Tensor process_accepted(const Context& ctx, const DraftBatch& batch);
  // Adds a level from the hidden states of the level before: [B, H] at level 0, else [B k, H].
  void expand(const Context& ctx, const DraftBatch& batch, int level, const Tensor& hidden);
  Draft select(const Context& ctx, const DraftBatch& batch);

  const DrafterSpec spec_;
  const ModelSpec& target_;
  const int topk_;                    // k: nodes of a level
  const DraftShape largest_;          // the largest depth D and tree size N
  const std::vector<int> vocab_ids_;  // draft id -> target id (FR-Spec, d2t); empty: identity
  DraftLimits limits_;
  int* draft_lengths_ = nullptr;  // [slots]: tokens in the draft's KV cache

 private:
  void prefill_shifted(const Context& ctx, const DraftPrompt& prompt);
  void layout(Carver& carver);
  int most_nodes(int depth) const { return 1 + num_candidates(topk_, depth); }

  ModelState* state_ = nullptr;
  MemoryPlan::Id buffer_id_ = 0, last_id_ = 0, map_id_ = 0;
  // Arrays for max_seqs sequences.
  DraftBeam beam_;
  Draft draft_;
  int* topk_tokens_ = nullptr;
  float* topk_logprobs_ = nullptr;
  // The inputs of the launch that processes the accepted tokens.
  int *ids_ = nullptr, *positions_ = nullptr, *token_seqs_ = nullptr, *hidden_rows_ = nullptr,
      *seq_token_begin_ = nullptr, *last_rows_ = nullptr;
  ShiftPromptParams shift_;
  int* id_map_ = nullptr;  // [draft vocabulary] draft id -> target id; null: the ids are equal
  Tensor last_hidden_;     // [max_seqs, H]: the hidden state of each sequence's last accepted token
};

}  // namespace cpmcu
