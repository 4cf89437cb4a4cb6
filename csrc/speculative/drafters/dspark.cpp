// DSpark heads: "dspark". A low-rank bigram (the Markov head) is added to a DFlash network whose
// root row predicts, too: the logit of token b below a is U(b) + W2[b] . W1[a].
//
// The engine adds the bigram only to the K likeliest tokens of U; the others keep U. Source:
// DSpark, DeepSeek-AI's DeepSpec, 2026.
#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

class DSparkDrafter : public BlockDrafter {
 public:
  DSparkDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "DSpark", {"rank", "successors"}),
        num_successors_(spec.options.integer("successors", target.vocab_size)),
        codebooks_(spec_.scope + "markov_head.markov_w1.weight",
                   spec_.scope + "markov_head.markov_w2.weight", spec.options.integer("rank", 256),
                   num_successors_) {
    const auto drafted = vocab_ids_.empty() ? target.vocab_size : std::ssize(vocab_ids_);
    CHECK(num_successors_ == drafted || num_successors_ == target.vocab_size,
          "the draft's markov_w2 has {} rows, expected {}, a row for each drafted token",
          num_successors_, drafted);
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BlockDrafter::plan(plan, states, limits);
    codebooks_.plan(plan, target_, model().dtype, int64_t{limits.max_seqs} * largest_.depth, topk_);
  }
  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    codebooks_.bind(arena);
  }
  void list_tensors(WeightTable& table) override {
    BlockDrafter::list_tensors(table);
    codebooks_.list_tensors(table);
  }

 protected:
  // If the draft's own vocabulary is smaller, markov_w2 has a row for each of its tokens. With
  // FR-Spec, markov_w2 has a row for each token of the target.
  bool own_ids() const override { return num_successors_ != target_.vocab_size; }

  Lattice score(const Context& ctx, const DraftBatch& batch,
                const Candidates& candidates) override {
    PairScoresParams params = pairs_of(batch, candidates);
    params.keeps_rest = true;
    return codebooks_.score(ctx, params);
  }

 private:
  const int num_successors_;
  Codebooks codebooks_;
};

REGISTER_DRAFTER("dspark", DSparkDrafter);

}  // namespace
}  // namespace cpmcu
