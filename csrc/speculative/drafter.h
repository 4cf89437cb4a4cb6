// A drafter proposes tokens that the target verifies. It reads hidden states, token ids and the
// accepted tokens, never a model class, and returns a Draft. A drafter is one file in drafters/
// that ends in REGISTER_DRAFTER("name", Class), and one file in cpmcu/drafters.
//
// The speculative step (step.h): the drafter proposes, the step builds trees from the draft, the
// target verifies them, the step accepts. The length of a drafter's cache follows from the target's
// lengths and the tokens that the last step accepted. So a skipped step breaks no state of a
// drafter, two drafters can run side by side, and a step is one CUDA graph.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/step/step.h"
#include "kernels/tree/tree.h"
#include "speculative/shape.h"
#include "state/state_cache.h"

namespace cpmcu {

// A drafter as plain data, built in Python (cpmcu/drafters).
struct DrafterSpec {
  std::string method;            // name with which the drafter is registered
  std::string scope = "draft.";  // begins the names of its tensors and buffers
  DraftShape shape{1, 2};        // the largest shape that is wanted; Drafter::largest is within it
  Params options;                // options that only this method reads
  std::optional<ModelSpec> model;  // spec of the draft's own layers
  // The drafters that a combination, such as hierarchical, is made of.
  std::vector<DrafterSpec> parts;
};

// The auxiliary hidden states that a drafter reads, for each token that the target computed.
struct HiddenNeeds {
  bool final = false;  // true: it reads the hidden state after the final norm, [H]
  // Numbers of the layers whose input (residual stream) it reads, [layers * H].
  std::vector<int> layers{};

  // The union of both needs. Throws Error(kInvalid) if they name different layers.
  HiddenNeeds with(const HiddenNeeds& other) const;
};
struct HiddenStates {
  // [rows, H] and [rows, layers * H]; empty if the drafter does not read them.
  Tensor final{}, layers{};
};

// Parts of the target that a drafter may share.
struct TargetParts {
  Tensor embedding_table;  // [V, H]
  // [V, H], valid in finish_loading; empty if the checkpoint's head is quantised.
  Tensor head_weight;
  // logits [R, V] float32 = scale * hidden [R, H] times the head.
  std::function<void(const Context&, const Tensor& logits, const Tensor& hidden, float scale)>
      project;
};

struct DraftLimits {
  int max_seqs = 0;            // maximum number of sequences of one step
  int max_slots = 0;           // number of sequence slots
  int max_prompt_tokens = 0;   // maximum number of tokens of a prompt chunk
  int max_kv = 0;              // the same as StepLimits::max_kv
  int max_path = 0;            // the same as Accepted::max_path: at least D + 1
  int compute_capability = 0;  // the same as Context::compute_capability
};

// The sequences of one step.
struct DraftBatch {
  int num_seqs = 0;                // B
  DraftShape shape;                // depth and tree size of this step's draft
  const int* seq_slots = nullptr;  // [B]
  int max_kv = 0;                  // upper bound of any sequence length
  const int* page_table = nullptr;
  int max_pages = 0;
  SlotState slots;  // state of the target: lengths, next_tokens, history and accepted
  // [slots * max_path, …] of the last tokens of each slot, in rows Accepted::hidden_row.
  HiddenStates accepted;

  // Drafted tokens of each sequence.
  int num_tokens() const { return shape.tree_size - 1; }
  // The sequences of a step of the draft, without its tokens and lengths.
  StepTokens step_tokens() const {
    return {.num_seqs = num_seqs,
            .max_kv = max_kv,
            .seq_slots = seq_slots,
            .page_table = page_table,
            .max_pages = max_pages};
  }
};

// A prompt chunk of each of B sequences.
struct DraftPrompt {
  StepTokens tokens;  // the chunk as the target ran it; slot_lengths are those before the chunk
  const int* ids = nullptr;       // [T]
  std::vector<int> num_before{};  // [B] tokens before the chunk, but not those of the cached prefix
  SlotState slots{};              // state before the chunk
  // [B, max_path] the last rows of each sequence, and their rows of `accepted`; -1: none.
  const int *last_rows = nullptr, *slot_rows = nullptr;
  HiddenStates hidden{};    // hidden states of the chunk's tokens, in T rows
  HiddenStates accepted{};  // the tokens before the chunk, in the rows of DraftBatch::accepted
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual HiddenNeeds needs() const { return {}; }

  // ---- shapes. A step without a draft (depth 0) does not ask the drafter.
  // The largest shape: a depth of 1 to kMaxDraftDepth, 1 to kMaxTreeSize nodes.
  virtual DraftShape largest() const = 0;
  // Whether the drafter can draft this shape, which is within `largest`.
  virtual bool fits(const DraftShape&) const { return true; }
  // The shapes among which each step may choose, from small to large; the last one is `largest`.
  virtual std::vector<DraftShape> shapes() const { return {largest()}; }
  // The largest shape within `limit` that fits; of depth 0 if there is none.
  virtual DraftShape shrunk(const DraftShape& limit) const;

  // Number of a sequence's last tokens that `propose` reads. A step accepts up to `depth` drafted
  // tokens.
  virtual int num_recent(int depth) const { return depth + 1; }
  // Number of KV entries beyond a sequence's length that the drafter's own layers need in a step of
  // this depth.
  virtual int lookahead(int) const { return 0; }
  // Number of a sequence's last KV entries that a later step may write again.
  virtual int num_rewritten() const { return 1; }
  // Declares the paged and per-slot state of the drafter's own layers in `states`.
  virtual void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable&) {}
  // The tensors of which each rank has a part, in the shapes of all ranks together.
  virtual WeightTable divided_tensors() const { return {}; }
  virtual void finish_loading(const Context&, const TargetParts&) {}
  // Runs the draft over a prompt chunk.
  virtual void prefill(const Context&, const DraftPrompt&) {}
  // Drafts 1 to batch.num_tokens() tokens for each sequence. The drafter owns the arrays of the
  // draft; they are valid until its next call. Graph-safe.
  virtual Draft propose(const Context& ctx, const DraftBatch& batch) = 0;
  // [B] the draft's own (inner) speculative steps of the last `propose`; null: it has none.
  virtual const InnerCounts* inner_counts() const { return nullptr; }
};

// A drafter whose drafts have no branches. It drafts chains of every length up to `shape.depth`.
class ChainDrafter : public Drafter {
 public:
  explicit ChainDrafter(const DraftShape& shape)
      : largest_{shape.depth, std::min(shape.tree_size, shape.depth + 1)} {}
  DraftShape largest() const override { return largest_; }
  bool fits(const DraftShape& shape) const override { return shape.tree_size <= shape.depth + 1; }
  std::vector<DraftShape> shapes() const override { return chain_shapes(largest_); }

 private:
  const DraftShape largest_;
};

using DrafterRegistry = Registry<Drafter, const DrafterSpec&, const ModelSpec&>;

// Creates the drafter of `spec` and checks its largest shape. `target`: the model that verifies.
std::unique_ptr<Drafter> make_drafter(const DrafterSpec& spec, const ModelSpec& target);

}  // namespace cpmcu

#define REGISTER_DRAFTER(name, Class)                                                             \
  static const bool registered_##Class = ::cpmcu::DrafterRegistry::instance().add(                \
      name,                                                                                       \
      [](const ::cpmcu::DrafterSpec& spec, const ::cpmcu::ModelSpec& target)                      \
          -> std::unique_ptr<::cpmcu::Drafter> { return std::make_unique<Class>(spec, target); }, \
      __FILE__)
