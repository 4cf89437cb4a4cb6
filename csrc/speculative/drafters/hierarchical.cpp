// A small language model that is itself drafted by an EAGLE head: "hierarchical".
//
// The model drafts a chain, as the drafter "model" does with top-k 1. Its first pass processes the
// accepted tokens and yields the first token of the chain. Speculative steps of its own, "inner"
// steps, yield the others: the head drafts a tree, the model verifies it greedily. Inner steps are
// exact, so the chain is the one that the model would draft by itself, only in fewer passes.
//
// The number of inner steps depends on the shape alone. A chain that is not complete after the last
// one is shorter. A sequence whose chain is complete emits nothing more (SlotStop).
//
// Inner state follows from the outer step (begin_inner): no inner token survives it, so a rejected
// chain or a skipped step needs no repair. Entries of the accepted tokens are written again.
// Sources: the `hier` drafters of CPM.cu; Sun et al., arXiv:2404.11912.
#include <algorithm>

#include "kernels/tree/inner_step.h"
#include "speculative/model_drafter.h"
#include "speculative/step.h"

namespace cpmcu {
namespace {

const DrafterSpec& head_of(const DrafterSpec& spec) {
  CHECK(spec.parts.size() == 1, "the drafter \"hierarchical\" has {} parts, expected 1, a head",
        spec.parts.size());
  return spec.parts[0];
}

class HierarchicalDrafter : public ModelDrafter {
 public:
  HierarchicalDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : ModelDrafter(spec, target),
        tokens_per_step_(spec_.options.integer("tokens_per_step", 2)),
        inner_({model(), language_model(), sampler_}, &head_of(spec_)) {
    spec_.options.check_known("a hierarchical draft", {"window", "topk", "tokens_per_step"});
    CHECK(topk_ == 1, "the drafter \"hierarchical\" has a top-k of {}, expected 1: a chain", topk_);
    CHECK(tokens_per_step_ >= 1, "an inner step is to draft {} tokens, expected at least 1",
          tokens_per_step_);
    language_model().keep_aux_hidden(inner_.needs().layers);
  }

  // A step accepts up to `depth + 1` tokens. The head's entry of the token before them holds the id
  // of the first one. That entry is written again, so the token's hidden state is read, too.
  int num_recent(int depth) const override { return std::max(depth + 2, inner_.max_path()); }
  // Inner sequences are up to `depth` tokens longer than outer ones.
  int lookahead(int depth) const override {
    return depth + 2 + std::max(inner_.lookahead(), num_recent(depth + 1));
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    ModelDrafter::plan(plan, states, limits);
    const int64_t rows = int64_t{limits.max_seqs} * max_path();
    rows_id_ =
        plan.add(spec_.scope + "inner_rows", "state", carved_bytes([&](Carver& c) { layout(c); }));
    sampler_.plan_greedy(plan, spec_.scope, limits.max_slots, most_head_rows());
    inner_.plan(plan, state(), states,
                {.scope = spec_.scope,
                 .max_seqs = limits.max_seqs,
                 .max_slots = limits.max_slots,
                 .max_prompt_tokens = std::max(limits.max_prompt_tokens, static_cast<int>(rows)),
                 .max_kv = limits.max_kv,
                 .max_path = max_path(),
                 .compute_capability = limits.compute_capability});
    CHECK_STATE(inner_.max_path() == max_path(), "an inner step keeps {} tokens, the outer {}",
                inner_.max_path(), max_path());
  }

  void bind(const Arena& arena) override {
    ModelDrafter::bind(arena);
    Carver carver(arena.array<char>(rows_id_));
    layout(carver);
    sampler_.bind(arena);
    inner_.bind(arena);
  }

  void list_tensors(WeightTable& table) override {
    ModelDrafter::list_tensors(table);
    inner_.list_tensors(table);
  }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    ModelDrafter::finish_loading(ctx, target);
    sampler_.clear(ctx);
    inner_.clear(ctx);
    inner_.finish_loading(ctx);
  }

  void prefill(const Context& ctx, const DraftPrompt& prompt) override {
    ModelDrafter::prefill(ctx, prompt);
    inner_.draft_prompt(ctx, prompt, /*skip=*/false);
  }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    const int num_tokens = std::min(batch.num_tokens(), batch.shape.depth);
    begin_chain(ctx, batch, num_tokens);
    for (int step = 0; step < num_inner_steps(num_tokens); ++step) {
      // Each step before this one has drafted at least one token.
      const SpeculativeStep::Batch inner{.num_seqs = batch.num_seqs,
                                         .max_kv = batch.max_kv,
                                         .shape = inner_shape(num_tokens - 1 - step),
                                         .seq_slots = batch.seq_slots};
      inner_.propose(ctx, inner);
      inner_.verify(ctx, inner);
      inner_.accept(ctx, inner, /*masked=*/false, {});
      extend_chain(ctx, {.num_seqs = batch.num_seqs,
                         .seq_slots = batch.seq_slots,
                         .accepted = inner_.slots().accepted,
                         .stops = inner_.stops(),
                         .num_tokens = num_tokens,
                         .chain = chain_,
                         .counts = counts_});
    }
    return {.num_tokens = num_tokens, .tokens = chain_};
  }

  const InnerCounts* inner_counts() const override { return counts_; }

 protected:
  int most_rows() const override { return std::max(max_path(), inner_.largest().tree_size); }
  int most_head_rows() const override { return limits_.max_seqs * inner_.largest().tree_size; }

 private:
  void layout(Carver& carver) {
    const int64_t rows = int64_t{limits_.max_seqs} * max_path();
    rows_ = carver.take<int>(rows);
    slot_rows_ = carver.take<int>(rows);
    chain_ = carver.take<int>(int64_t{limits_.max_seqs} * largest_.depth);
    counts_ = carver.take<InnerCounts>(limits_.max_seqs);
  }

  // Processes the accepted tokens, drafts the first token and begins the inner sequences behind it.
  void begin_chain(const Context& ctx, const DraftBatch& batch, int num_tokens) {
    const int num_rows = batch.num_seqs * max_path();
    const Tensor last = process_accepted(ctx, batch);
    const HiddenStates hidden = inner_.hidden_of(ctx, num_rows);
    expand(ctx, batch, 0, last);
    begin_inner(ctx, {.num_seqs = batch.num_seqs,
                      .seq_slots = batch.seq_slots,
                      .lengths = batch.slots.lengths,
                      .accepted = batch.slots.accepted,
                      .first_tokens = beam_of(batch).token_ids,
                      .inner = inner_.slots(),
                      .stops = inner_.stops(),
                      .rows = rows_,
                      .slot_rows = slot_rows_,
                      .num_tokens = num_tokens,
                      .chain = chain_,
                      .counts = counts_});
    inner_.keep_hidden(ctx, hidden, rows_, slot_rows_, num_rows);
  }

  int num_inner_steps(int num_tokens) const {
    return (num_tokens - 1 + tokens_per_step_ - 1) / tokens_per_step_;
  }

  // The shape of an inner step that may draft up to `most` tokens.
  DraftShape inner_shape(int most) const {
    return inner_.shrunk({most - 1, inner_.largest().tree_size});
  }

  const int tokens_per_step_;  // tokens that an inner step is expected to draft
  Sampler sampler_;
  SpeculativeStep inner_;
  MemoryPlan::Id rows_id_ = 0;
  int *rows_ = nullptr, *slot_rows_ = nullptr;  // [B, max_path] each, written by begin_inner
  int* chain_ = nullptr;                        // [B, M]: the drafts
  InnerCounts* counts_ = nullptr;               // [B]
};

REGISTER_DRAFTER("hierarchical", HierarchicalDrafter);

}  // namespace
}  // namespace cpmcu
