// The speculative step: propose, verify, accept. Without a drafter it is plain decoding: each tree
// is its root alone.
//
//   propose   the drafter returns a draft for each sequence; the step builds a token tree from it
//   verify    the target runs over all nodes of all trees
//   accept    the sampler draws a token at each node and accepts drafted tokens that equal it
//
// The step only enqueues launches. Lengths, counts and trees are in device memory, so the launches
// of a step can be captured in one CUDA graph.
//
// The step owns the per-slot state of the target's sequences. The engine has one step. A drafter
// that drafts speculatively itself has another.
#pragma once

#include <optional>
#include <vector>

#include "core/carver.h"
#include "model/sampler.h"
#include "model/transformer.h"
#include "speculative/drafter.h"

namespace cpmcu {

// The model that verifies, and its sampler.
struct Target {
  const ModelSpec& spec;
  Transformer& model;
  Sampler& sampler;
};

struct SpeculativeStepLimits {
  std::string scope{};        // begins the names of the step's buffers
  int max_seqs = 0;           // maximum number of sequences of one step
  int max_slots = 0;          // number of sequence slots
  int max_prompt_tokens = 0;  // maximum number of tokens of a prompt chunk
  int max_tokens = 0;         // maximum number of a sequence's tokens that are stored as history
  int max_kv = 0;             // the same as StepLimits::max_kv
  int max_path = 0;           // minimum number of recent tokens that are kept for the drafter
  int compute_capability = 0;
};

class SpeculativeStep {
 public:
  // The sequences of one step.
  struct Batch {
    int num_seqs = 0;
    int max_kv = 0;  // upper bound of any sequence length, tree nodes included
    DraftShape shape;
    const int* seq_slots = nullptr;  // [B] in device memory
    int num_tokens() const { return num_seqs * shape.tree_size; }
  };
  // Node 0 is the root: the last emitted token. Unused nodes hold token -1. Without a drafter the
  // root's token is not copied to the host; it is reported as 0.
  struct DraftedTree {
    std::vector<int> tokens{}, parents{};  // [N]
  };

  // `spec`: null for plain decoding.
  SpeculativeStep(const Target& target, const DrafterSpec* spec);
  ~SpeculativeStep();

  const HiddenNeeds& needs() const { return needs_; }  // the drafter's

  // ---- sizes
  DraftShape largest() const { return largest_; }
  // Recent tokens that are kept for the drafter, at least as many as a step emits.
  int max_path() const { return max_path_; }
  // KV entries beyond its length that a sequence needs during a step. In the target's cache they
  // hold the tree; in the draft's cache they hold the accepted tokens and the levels of the tree.
  int lookahead() const;
  // The shapes among which each step may choose: no draft, and those of the drafter.
  std::vector<DraftShape> shapes() const;
  // The largest shape within `limit`.
  DraftShape shrunk(const DraftShape& limit) const;
  // Throws if the shape is larger than `largest`, or if the drafter cannot draft it.
  void check_shape(const DraftShape& shape) const;
  // As Drafter::num_rewritten; 0 without a drafter.
  int num_rewritten() const { return drafter_ ? drafter_->num_rewritten() : 0; }

  // ---- set-up
  // `state`: what the target keeps for each sequence. `states` holds the tensors of all models.
  void plan(MemoryPlan& plan, ModelState& state, StateCache& states,
            const SpeculativeStepLimits& limits);
  void bind(const Arena& arena);
  void clear(const Context& ctx);  // called after `bind`, before the first sequence
  void list_tensors(WeightTable& table) const;
  // As Drafter::divided_tensors.
  WeightTable divided_tensors() const {
    return drafter_ ? drafter_->divided_tensors() : WeightTable();
  }
  void finish_loading(const Context& ctx);

  // ---- the step. Graph-safe
  void propose(const Context& ctx, const Batch& batch);
  // `accept` follows without another step or release between, if `goes_on`.
  void verify(const Context& ctx, const Batch& batch, bool goes_on = false);
  // Draws, accepts, and publishes the results to `sink`. `masked`: apply the sampler's masks.
  void accept(const Context& ctx, const Batch& batch, bool masked, const ResultSink& sink);

  // Copies the trees of a step to the host. Call it between `propose` and `accept`.
  void publish_trees(const Context& ctx, const Batch& batch);
  // Waits for the copy of publish_trees.
  std::vector<DraftedTree> read_trees(const Batch& batch) const;

  // ---- sequences and prompts
  const SlotState& slots() const { return slots_; }
  SlotStop* stops() const { return stops_; }  // [slots]
  // Starts a sequence in `slot`. `stop` says when it ends. `cached`: its first tokens, whose keys
  // and values exist already.
  void reset(const Context& ctx, int slot, const SlotStop& stop,
             const std::vector<int>& cached = {});
  // Runs the drafter over a prompt chunk, after the target's pass over it, unless `skip`. The step
  // itself sets the hidden states of `prompt`.
  void draft_prompt(const Context& ctx, DraftPrompt prompt, bool skip);
  // The auxiliary hidden states of the target's last pass, over a prompt or not. They stay valid
  // until the target's next pass.
  HiddenStates hidden_of(const Context& ctx, int num_tokens) const;
  // Keeps auxiliary hidden states for the drafter: row rows[i] of them becomes accepted hidden
  // state slot_rows[i].
  void keep_hidden(const Context& ctx, const HiddenStates& hidden, const int* rows,
                   const int* slot_rows, int num_rows) const;

 private:
  void layout(Carver& carver);
  DraftBatch draft_batch(const Batch& batch) const;
  TokenTrees trees_of(const Batch& batch) const;
  Step verify_step(const Batch& batch) const;
  void draw(const Context& ctx, const Batch& batch, bool masked);
  void commit(const Context& ctx, const Batch& batch);
  bool logits_fit(const Batch& batch) const {
    return batch.num_tokens() <= target_.model.max_logit_rows();
  }

  Target target_;
  ModelState* state_ = nullptr;  // state of the target
  StateCache* states_ = nullptr;
  std::string method_;  // name of the drafter
  std::unique_ptr<Drafter> drafter_;
  HiddenNeeds needs_;
  DraftShape largest_;
  int max_path_ = 1;
  SpeculativeStepLimits limits_;
  int64_t num_bytes_ = 0;  // size of buffer_, in bytes
  MemoryPlan::Id buffer_id_ = 0, history_id_ = 0, final_id_ = 0, accepted_final_id_ = 0,
                 accepted_layers_id_ = 0;
  char* buffer_ = nullptr;
  SlotState slots_;
  TokenTrees trees_;
  SlotStop* stops_ = nullptr;          // [slots]
  SlotStop* stops_staging_ = nullptr;  // [slots] pinned staging buffer
  int* trees_staging_ = nullptr;       // pinned memory for tokens and parents: [2, B N]
  std::optional<Event> trees_ready_;   // the copy to trees_staging_ is done
  Device device_;
  Tensor final_;           // [T, H]: hidden states of a target pass, after the final norm
  HiddenStates accepted_;  // [slots * (D + 1), …]: hidden states of the accepted tokens
};

}  // namespace cpmcu
