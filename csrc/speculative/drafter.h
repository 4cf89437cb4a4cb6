// What proposes tokens for the target to verify. A drafter sees hidden states, token ids and what
// was accepted, never a model class, and answers with a Draft. One file in drafters/ that ends in
// REGISTER_DRAFTER("name", Class), and one in cpmcu/drafters.
//
// The speculative step (step.h): propose -> the step makes trees of the draft -> the target
// verifies them -> accept. What a drafter has cached follows from the target's lengths and from
// what the last step accepted. So a drafter has no state that a skipped step could break, two of
// them can work side by side, and a step is one graph.
#pragma once

#include <compare>
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
#include "state/state_cache.h"

namespace cpmcu {

// A drafter as plain data, made in Python (cpmcu/drafters).
struct DrafterSpec {
  std::string method;              // a registered name
  std::string scope = "draft.";    // begins the names of its tensors and buffers
  int depth = 2;                   // D: tokens of the longest drafted path
  int topk = 10;                   // k: width of a level; a chain has 1
  int tree_size = 12;              // N: tokens verified, root included
  Params options;                  // of this method alone
  std::optional<ModelSpec> model;  // the draft's own layers
  std::vector<DrafterSpec> parts;  // of a drafter that is made of others

  void check_validity() const;
};

// How much one step drafts: up to what the DrafterSpec says. Depth 0: nothing, the root alone is
// verified.
struct DraftShape {
  int depth = 0;
  int tree_size = 1;
  auto operator<=>(const DraftShape&) const = default;
};

// Auxiliary hidden states: what a drafter reads of every token that the target computed.
struct HiddenNeeds {
  bool final = false;         // after the final norm, [H]
  std::vector<int> layers{};  // the residual stream entering these layers, [layers * H]

  // Both needs at once. Throws Error(kInvalid) if they name different layers.
  HiddenNeeds with(const HiddenNeeds& other) const;
};
struct HiddenStates {
  Tensor final{}, layers{};  // [rows, H], [rows, layers * H]; empty if not needed
};

// Parts of the target that a drafter may share.
struct TargetParts {
  Tensor embedding_table;  // [V, H]
  Tensor head_weight;      // [V, H] during finish_loading; empty if the checkpoint quantised it
  // logits [R, V] float32 = scale * hidden [R, H] times the head.
  std::function<void(const Context&, const Tensor& logits, const Tensor& hidden, float scale)>
      project;
};

struct DraftLimits {
  int max_seqs = 0;            // sequences of one step
  int max_slots = 0;           // sequence slots
  int max_prompt_tokens = 0;   // tokens of a prompt chunk
  int max_kv = 0;              // as in StepLimits
  int max_path = 0;            // D + 1 of the step: tokens that one step accepts
  int compute_capability = 0;  // as in Context
};

// One step's sequences.
struct DraftBatch {
  int num_seqs = 0;                // B
  DraftShape shape;                // of this step
  const int* seq_slots = nullptr;  // [B]
  int max_kv = 0;                  // upper bound of any length
  const int* page_table = nullptr;
  int max_pages = 0;
  SlotState slots;        // of the target: lengths, next tokens, history, accepted
  HiddenStates accepted;  // [slots * (D + 1), …]: of accepted token j in row slot (D + 1) + j

  // Tokens of each sequence's draft.
  int num_tokens() const { return shape.tree_size - 1; }
};

// A prompt chunk of each of B sequences.
struct DraftPrompt {
  StepTokens tokens;                // the target's; slot_lengths: tokens cached before the chunk
  const int* ids = nullptr;         // [T]
  bool continues = false;           // some sequence has tokens of its own before its chunk
  const int* num_shared = nullptr;  // [slots] as in SlotState
  HiddenStates hidden{};            // [T, …]
  HiddenStates accepted{};          // row slot (D + 1): of the token before the chunk
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual HiddenNeeds needs() const { return {}; }
  // `states`: where it declares the paged and per-slot state of its own layers.
  virtual void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable&) {}
  virtual void finish_loading(const Context&, const TargetParts&) {}
  // Runs the draft over a prompt chunk.
  virtual void prefill(const Context&, const DraftPrompt&) {}
  // Drafts up to batch.num_tokens() tokens a sequence, at least one. The arrays are the drafter's,
  // valid until its next call. Graph-safe.
  virtual Draft propose(const Context& ctx, const DraftBatch& batch) = 0;
};

using DrafterRegistry = Registry<Drafter, const DrafterSpec&, const ModelSpec&>;

// Checks the specification and makes its drafter. `target`: the model that verifies.
std::unique_ptr<Drafter> make_drafter(const DrafterSpec& spec, const ModelSpec& target);

}  // namespace cpmcu

#define REGISTER_DRAFTER(name, Class)                                                             \
  static const bool registered_##Class = ::cpmcu::DrafterRegistry::instance().add(                \
      name,                                                                                       \
      [](const ::cpmcu::DrafterSpec& spec, const ::cpmcu::ModelSpec& target)                      \
          -> std::unique_ptr<::cpmcu::Drafter> { return std::make_unique<Class>(spec, target); }, \
      __FILE__)
