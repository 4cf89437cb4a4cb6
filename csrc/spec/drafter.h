// What proposes tokens for the target to verify. A drafter sees hidden states, token ids and a
// token tree, never a model class. One file in drafters/ that ends in REGISTER_DRAFTER("name",
// Class), and one in cpmcu/drafters.
//
// The engine's cycle: propose -> the target verifies the tree -> accept. What was accepted reaches
// the drafter as "pending" ids and features of each slot, with which it catches up at the start of
// its next `propose`: lengths, counts and trees are device memory, so a cycle is one graph.
#pragma once

#include <compare>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/step.h"
#include "kernels/tree.h"
#include "layers/kv_cache.h"

namespace cpmcu {

// A drafter as plain data, made in Python (cpmcu/drafters).
struct DrafterSpec {
  std::string method;               // a registered name
  ModelSpec model;                  // the draft's own layers; not used by n-gram
  int depth = 2;                    // D: tokens of the longest drafted path
  int topk = 10;                    // k: width of a level; a chain has 1
  int tree_size = 12;               // N: rows verified, root included
  int window = 0;                   // tokens that the draft's attention sees; 0: all
  std::vector<int> feature_layers;  // target layers whose inputs are the features (EAGLE-3)
  std::vector<int> vocab_ids;       // draft id -> target id (FR-Spec, d2t); empty: the same
  int min_ngram = 1;
  int max_ngram = 4;
  bool input_norms = false;     // EAGLE: RMSNorm of embedding and feature (MiniCPM4)
  bool attention_norm = false;  // EAGLE: input_layernorm in the first layer
  bool fc_bias = false;         // EAGLE
  bool own_head = false;        // has an lm_head of its own
  bool norm_output = false;     // EAGLE-3.1: the recycled hidden state is the normed one

  void check_validity(const ModelSpec& target) const;
};

// How much one cycle drafts: up to what the DrafterSpec says. Depth 0: nothing, the root alone is
// verified.
struct DraftShape {
  int depth = 0;
  int tree_size = 1;
  auto operator<=>(const DraftShape&) const = default;
};

// What the drafter wants to see of each row of the target.
enum class FeatureKind {
  kNone,
  kFinal,   // the hidden state after the final norm, [H]
  kLayers,  // the residual stream entering DrafterSpec::feature_layers, [layers * H]
};

// Parts of the target that a drafter may share.
struct TargetParts {
  const ModelSpec* spec = nullptr;
  Tensor embedding_table;  // [V, H]
  Tensor head_weight;      // [V, H] during finish_loading; empty if the checkpoint quantised it
  // logits [R, V] float32 = scale * hidden [R, H] times the head.
  std::function<void(const Context&, const Tensor& logits, const Tensor& hidden, float scale)>
      project;
};

struct DraftLimits {
  int max_seqs = 0;
  int max_prompt_rows = 0;  // rows of a prompt chunk
  int max_model_len = 0;
  int first_kv_layer = 0;      // where the drafter's layers begin in the KV cache
  int compute_capability = 0;  // as in Context
};

// Device state that the engine keeps between cycles for the drafter.
struct DraftState {
  int* draft_lengths = nullptr;   // [slots] cells in the drafter's cache
  int* pending_ids = nullptr;     // [slots, D + 1]
  int* pending_counts = nullptr;  // [slots]
  Tensor pending_features{};      // [slots * (D + 1), F]; empty if there are none
};

// One cycle's sequences.
struct DraftBatch {
  int num_seqs = 0;
  int depth = 0;                   // of this cycle's trees, 1 to D
  const int* seq_slots = nullptr;  // [B]
  int max_kv = 0;                  // upper bound of any length
  const KvCache* cache = nullptr;
  DraftState state;
  SlotState slots;   // lengths, next tokens, history of the target
  TokenTrees trees;  // out
};

// A chunk of one prompt, its target features beside it. Arrays are device memory.
struct DraftPrompt {
  int start = 0;                          // position of the first row
  int num_rows = 0;                       // n
  const int* ids = nullptr;               // [n]
  const int* positions = nullptr;         // [n]
  const int* seq_slot = nullptr;          // [1]
  const int* zeros = nullptr;             // [n]
  const int* item = nullptr;              // {0, 1, 0, n - 1, 0, n, start - 1}
  const int* draft_lengths = nullptr;     // [slots]
  std::function<void(int)> set_length{};  // of this slot in draft_lengths, in stream order
  Tensor features{};                      // [n, F]
  Tensor pending_feature{};               // [1, F]: of the row before `start`
  const KvCache* cache = nullptr;
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual FeatureKind features() const { return FeatureKind::kNone; }
  virtual bool has_cache() const { return false; }
  virtual KvCache::Shape cache_shape() const { return {}; }
  virtual void plan(MemoryPlan& plan, const DraftLimits& limits) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable&) {}
  virtual void finish_loading(const Context&, const TargetParts&) {}
  // Runs the draft over a prompt chunk; leaves the slot's draft length as the cells that are
  // cached.
  virtual void prefill(const Context&, const DraftPrompt&) {}
  // Fills the trees. Graph-safe.
  virtual void propose(const Context& ctx, const DraftBatch& batch) = 0;
  // Instead, in a cycle that drafts nothing: what is pending will never be seen. Graph-safe.
  virtual void skip(const Context&, const DraftBatch&) {}
};

using DrafterRegistry = Registry<Drafter, const DrafterSpec&, const ModelSpec&>;

}  // namespace cpmcu

#define REGISTER_DRAFTER(name, Class)                                                             \
  static const bool registered_##Class = ::cpmcu::DrafterRegistry::instance().add(                \
      name,                                                                                       \
      [](const ::cpmcu::DrafterSpec& spec, const ::cpmcu::ModelSpec& target)                      \
          -> std::unique_ptr<::cpmcu::Drafter> { return std::make_unique<Class>(spec, target); }, \
      __FILE__)
