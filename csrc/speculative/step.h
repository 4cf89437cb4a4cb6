// The speculative step: propose, verify, accept. A step without a drafter is plain decoding: the
// tree is the root alone.
//
// A drafter proposes a draft for each sequence; the step makes trees of them. The target runs over
// all nodes, the sampler draws a token at each, and drafted tokens that agree with the draws are
// accepted. The step enqueues all of it and waits for nothing: lengths, counts and trees are device
// memory, so the launches of a step can be one CUDA graph.
//
// The step owns the per-slot state of its target's sequences. The engine has one step; a drafter
// that drafts with a drafter of its own has another.
#pragma once

#include <optional>
#include <vector>

#include "core/carver.h"
#include "model/sampler.h"
#include "model/transformer.h"
#include "speculative/drafter.h"

namespace cpmcu {

// The model that verifies, its state, and its sampler.
struct Target {
  const ModelSpec& spec;
  Transformer& model;
  ModelState& state;   // of the model
  StateCache& states;  // the cache that `state` is part of
  Sampler& sampler;
};

struct SpeculativeStepLimits {
  int max_seqs = 0;           // sequences of one step
  int max_slots = 0;          // sequence slots
  int max_prompt_tokens = 0;  // tokens of a prompt chunk
  int max_tokens = 0;         // of a sequence
  int max_kv = 0;             // as in StepLimits
  int compute_capability = 0;
};

class SpeculativeStep {
 public:
  // The sequences of one step.
  struct Batch {
    int num_seqs = 0;
    int max_kv = 0;  // upper bound of any length, nodes included
    DraftShape shape;
    const int* seq_slots = nullptr;  // [B] device
    int num_rows() const { return num_seqs * shape.tree_size; }
  };
  // Node 0 is the root, whose token has been emitted. Unused nodes hold token -1. Without a
  // drafter the root's token is not read back: it is 0.
  struct DraftedTree {
    std::vector<int> tokens{}, parents{};  // [N]
  };

  // `spec`: null for plain decoding.
  SpeculativeStep(const Target& target, const DrafterSpec* spec);
  ~SpeculativeStep();

  const HiddenNeeds& needs() const { return needs_; }  // of the drafter

  // ---- sizes
  DraftShape largest() const { return largest_; }
  int max_path() const { return largest_.depth + 1; }  // tokens that a step emits, at most
  // Tokens beyond its own that a sequence holds during a step: the tree that is verified, and in
  // the draft's cache the tokens that catch up and the levels of the tree.
  int lookahead() const;
  // Throws for a shape that is larger than `largest` or that its depth cannot fill.
  void check_shape(const DraftShape& shape) const;

  // ---- set-up
  void plan(MemoryPlan& plan, const SpeculativeStepLimits& limits);
  void bind(const Context& ctx, const Arena& arena);
  void list_tensors(WeightTable& table) const;
  void finish_loading(const Context& ctx);

  // ---- the step. Graph-safe
  void propose(const Context& ctx, const Batch& batch);
  void verify(const Context& ctx, const Batch& batch);
  // Draws, accepts, publishes to `sink`. `masked`: with the masks that the sampler has.
  void accept(const Context& ctx, const Batch& batch, bool masked, const ResultSink& sink);

  // The trees of a step between `propose` and `accept`, for the host.
  void publish_trees(const Context& ctx, const Batch& batch);
  std::vector<DraftedTree> read_trees(const Batch& batch) const;  // waits for the draft

  // ---- sequences and prompts
  const SlotState& slots() const { return slots_; }
  // A sequence begins in `slot` and ends by `stop`.
  void reset(const Context& ctx, int slot, const SlotStop& stop);
  // After the target's pass over a prompt chunk: the drafter sees the chunk, or with `skip` only
  // its last token. `continues`: some sequence has tokens before its chunk. `last_rows` [B], on the
  // device: the last row of each sequence; `slot_rows` [B]: slot (D + 1).
  void draft_prompt(const Context& ctx, const Step& step, bool continues, bool skip,
                    const int* last_rows, const int* slot_rows);

 private:
  void layout(Carver& carver);
  TokenTrees trees_of(const Batch& batch) const;
  Step verify_step(const Batch& batch) const;
  void draw(const Context& ctx, const Batch& batch, bool masked);
  void commit(const Context& ctx, const Batch& batch);
  bool logits_fit(const Batch& batch) const {
    return batch.num_rows() <= target_.model.max_logit_rows();
  }

  Target target_;
  std::optional<DrafterSpec> spec_;
  std::unique_ptr<Drafter> drafter_;
  HiddenNeeds needs_;
  DraftShape largest_;
  SpeculativeStepLimits limits_;
  MemoryPlan::Id buffer_id_ = 0, history_id_ = 0, final_id_ = 0, accepted_final_id_ = 0,
                 accepted_layers_id_ = 0;
  SlotState slots_;
  TokenTrees trees_;
  SlotStop* stops_ = nullptr;         // [slots]
  SlotStop* stops_mirror_ = nullptr;  // pinned
  int* trees_mirror_ = nullptr;       // pinned: tokens and parents, [2, B N]
  std::optional<Event> trees_ready_;  // in the mirror
  Device device_;
  Tensor final_;           // [T, H] of a prompt chunk
  HiddenStates accepted_;  // [slots * (D + 1), …]
};

}  // namespace cpmcu
