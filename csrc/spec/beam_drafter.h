// A drafter that is a network: it catches up with what was accepted, then grows a tree level by
// level. EAGLE heads and small language models differ only in how they make hidden states from ids
// and features (`forward`), and logits from hidden states (`head`).
#pragma once

#include "spec/drafter.h"

namespace cpmcu {

class BeamDrafter : public Drafter {
 public:
  BeamDrafter(const DrafterSpec& spec, const ModelSpec& target) : spec_(spec), target_(target) {}

  bool has_cache() const override { return true; }
  KvCache::Shape cache_shape() const override {
    return {.num_layers = spec_.model.num_hidden_layers,
            .num_kv_heads = spec_.model.num_key_value_heads,
            .head_dim = spec_.model.head_dim,
            .dtype = spec_.model.dtype};
  }
  void plan(MemoryPlan& plan, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;
  void prefill(const Context& ctx, const DraftPrompt& prompt) override;
  void propose(const Context& ctx, const DraftBatch& batch) override;
  void skip(const Context& ctx, const DraftBatch& batch) override;

 protected:
  // Where a row's second input comes from.
  enum class Source { kTarget, kRecycled };

  // Row t of a step has x[index[t]] for its feature; without an index x[t].
  struct Features {
    Tensor x;  // [*, F] from the target, [*, H] recycled
    const int* index = nullptr;
  };

  // Hidden states [R, H] of rows. Written where `bind` said; valid through `head` and, as recycled
  // features, in the next call.
  virtual Tensor forward(const Context& ctx, const Step& step, const Features& features,
                         Source source, const KvCache& cache) = 0;
  // Logits [R, draft vocabulary] float32.
  virtual Tensor head(const Context& ctx, const Tensor& hidden) = 0;
  // EAGLE's row t holds the feature of token t and the id of token t + 1.
  virtual bool shifted() const = 0;

  const DrafterSpec spec_;
  const ModelSpec& target_;
  DraftLimits limits_;

 private:
  int max_pending() const { return spec_.depth + 1; }
  void run_prompt(const Context& ctx, const DraftPrompt& prompt, int first, int count,
                  const int* positions, const int* row_begin, const Tensor& features);

  MemoryPlan::Id ints_id_ = 0, floats_id_ = 0, masks_id_ = 0, last_id_ = 0, map_id_ = 0;
  int64_t num_ints_ = 0, num_floats_ = 0;
  DraftBeam beam_;  // its arrays, for max_seqs sequences
  int* topk_tokens_ = nullptr;
  float* topk_logprobs_ = nullptr;
  int *sync_ids_ = nullptr, *sync_positions_ = nullptr, *sync_seqs_ = nullptr,
      *sync_features_ = nullptr, *sync_begin_ = nullptr, *last_rows_ = nullptr;
  int* id_map_ = nullptr;  // [draft vocabulary], null: the same ids
  Tensor last_hidden_;     // [max_seqs, H]: of the rows that the tree continues
};

}  // namespace cpmcu
