// Prompt look-up: "ngram". It finds an earlier occurrence of the last n tokens and proposes the
// tokens that followed it. It has no weights.
#include <algorithm>

#include "speculative/drafter.h"

namespace cpmcu {
namespace {

class NgramDrafter : public ChainDrafter {
 public:
  NgramDrafter(const DrafterSpec& spec, const ModelSpec&)
      : ChainDrafter(spec.shape),
        min_ngram_(spec.options.integer("min_ngram", 1)),
        max_ngram_(spec.options.integer("max_ngram", 4)),
        scope_(spec.scope) {
    spec.options.check_known("n-gram look-up", {"min_ngram", "max_ngram"});
    CHECK(min_ngram_ >= 1 && min_ngram_ <= max_ngram_ && max_ngram_ <= kMaxNgram,
          "n-grams have {} to {} tokens, expected 1 to {}", min_ngram_, max_ngram_, kMaxNgram);
  }

  void plan(MemoryPlan& plan, StateCache&, const DraftLimits& limits) override {
    chain_id_ = plan.add(scope_ + "chain", "state", int64_t{4} * limits.max_seqs * largest().depth);
  }
  void bind(const Arena& arena) override { chain_ = arena.array<int>(chain_id_); }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    const int num_tokens = batch.num_tokens();
    ngram_lookup(ctx, {.seq_slots = batch.seq_slots,
                       .num_seqs = batch.num_seqs,
                       .history = batch.slots.history,
                       .max_len = batch.slots.max_len,
                       .lengths = batch.slots.lengths,
                       .next_tokens = batch.slots.next_tokens,
                       .min_ngram = min_ngram_,
                       .max_ngram = max_ngram_,
                       .chain = chain_,
                       .first = 0,
                       .num_tokens = num_tokens});
    return {.num_tokens = num_tokens, .tokens = chain_};
  }

 private:
  const int min_ngram_, max_ngram_;
  const std::string scope_;
  MemoryPlan::Id chain_id_ = 0;
  int* chain_ = nullptr;  // [B, M]: the drafts
};

REGISTER_DRAFTER("ngram", NgramDrafter);

}  // namespace
}  // namespace cpmcu
