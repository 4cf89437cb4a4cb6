// A drafter that is a network: it catches up with what was accepted, then grows a tree level by
// level. EAGLE heads and small language models differ only in how they make hidden states from ids
// and the target's hidden states (`forward`), and logits from hidden states (`head`).
//
// Its attention finds stale or no keys for the tokens of steps that drafted nothing. That costs
// acceptance for a while, never text.
#pragma once

#include "core/carver.h"
#include "speculative/drafter.h"

namespace cpmcu {

class BeamDrafter : public Drafter {
 public:
  BeamDrafter(const DrafterSpec& spec, const ModelSpec& target);

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;
  void prefill(const Context& ctx, const DraftPrompt& prompt) override;
  Draft propose(const Context& ctx, const DraftBatch& batch) override;

 protected:
  // Where a row's second input comes from.
  enum class Source { kTarget, kRecycled };

  // Row t of a step reads x[index[t]]; without an index x[t].
  struct HiddenRows {
    Tensor x;  // [*, F] from the target, [*, H] recycled
    const int* index = nullptr;
  };

  // Hidden states [R, H] of rows. Written where `bind` said; valid through `head` and, as recycled
  // ones, in the next call.
  virtual Tensor forward(const Context& ctx, const Step& step, const HiddenRows& hidden,
                         Source source) = 0;
  // Logits [R, draft vocabulary] float32.
  virtual Tensor head(const Context& ctx, const Tensor& hidden) = 0;
  // EAGLE's row t holds the hidden state of token t and the id of token t + 1.
  virtual bool shifted() const = 0;
  // Which of the target's hidden states it reads.
  virtual Tensor pick(const HiddenStates&) const { return {}; }

  const ModelSpec& model() const { return *spec_.model; }  // the draft's own layers
  ModelState& state() { return *state_; }
  // Limits of the draft's own steps.
  StepLimits step_limits() const;
  int max_path() const { return limits_.max_path; }

  const DrafterSpec spec_;
  const ModelSpec& target_;
  const std::vector<int> vocab_ids_;  // draft id -> target id (FR-Spec, d2t); empty: the same
  DraftLimits limits_;

 private:
  void prefill_shifted(const Context& ctx, const DraftPrompt& prompt);
  Tensor catch_up(const Context& ctx, const DraftBatch& batch, StepTokens tokens);
  void layout(Carver& carver);

  ModelState* state_ = nullptr;
  MemoryPlan::Id buffer_id_ = 0, last_id_ = 0, map_id_ = 0;
  // Arrays for max_seqs sequences.
  DraftBeam beam_;
  Draft draft_;
  int* topk_tokens_ = nullptr;
  float* topk_logprobs_ = nullptr;
  int* draft_lengths_ = nullptr;  // [slots] tokens in the draft's cache
  int *ids_ = nullptr, *positions_ = nullptr, *token_seqs_ = nullptr, *hidden_rows_ = nullptr,
      *row_begin_ = nullptr, *last_rows_ = nullptr;  // of the rows that catch up
  ShiftPromptParams shift_;
  int* id_map_ = nullptr;  // [draft vocabulary]; null: the same ids
  Tensor last_hidden_;     // [max_seqs, H]: of the rows that the tree continues
};

}  // namespace cpmcu
