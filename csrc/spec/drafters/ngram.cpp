// Prompt look-up: what followed the last tokens when they occurred before: "ngram". No weights.
#include "spec/drafter.h"

namespace cpmcu {
namespace {

class NgramDrafter : public Drafter {
 public:
  NgramDrafter(const DrafterSpec& spec, const ModelSpec&) : spec_(spec) {
    CHECK(spec.min_ngram >= 1 && spec.min_ngram <= spec.max_ngram && spec.max_ngram <= kMaxNgram,
          "n-grams of {} to {} tokens were asked for, expected 1 to {}", spec.min_ngram,
          spec.max_ngram, kMaxNgram);
  }

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    chain_id_ = plan.add("draft.chain", "state", int64_t{4} * limits.max_seqs * spec_.depth);
  }
  void bind(const Arena& arena) override { chain_ = arena.array<int>(chain_id_); }

  void propose(const Context& ctx, const DraftBatch& batch) override {
    ngram_lookup(ctx, {.seq_slots = batch.seq_slots,
                       .num_seqs = batch.num_seqs,
                       .history = batch.slots.history,
                       .max_len = batch.slots.max_len,
                       .lengths = batch.slots.lengths,
                       .next_tokens = batch.slots.next_tokens,
                       .min_ngram = spec_.min_ngram,
                       .max_ngram = spec_.max_ngram,
                       .chain = chain_,
                       .first = 0,
                       .num_tokens = batch.trees.num_nodes - 1});
    chain_build(ctx, {.chain = chain_,
                      .trees = batch.trees,
                      .seq_slots = batch.seq_slots,
                      .slots = batch.slots});
  }

 private:
  const DrafterSpec spec_;
  MemoryPlan::Id chain_id_ = 0;
  int* chain_ = nullptr;  // [B, N - 1]
};

REGISTER_DRAFTER("ngram", NgramDrafter);

}  // namespace
}  // namespace cpmcu
