// A plugin drafter with options of its own, whose trees are combs: a spine that repeats the last
// token, and at every level the same number of leaves beside it. Compiled by
// tests/unit/test_drafter_options.py; CPU only.
#include "speculative/drafter.h"

namespace {

using namespace cpmcu;

class CombDrafter : public Drafter {
 public:
  CombDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : largest_(spec.shape),
        width_(spec.options.integer("width", 2)),
        vocab_size_(target.vocab_size) {
    spec.options.check_known("a comb", {"width"});
  }

  DraftShape largest() const override { return largest_; }
  bool fits(const DraftShape& shape) const override {
    return shape.tree_size == 1 + width_ * shape.depth;
  }
  std::vector<DraftShape> shapes() const override {
    std::vector<DraftShape> shapes;
    for (int depth = 1; depth <= largest_.depth; ++depth) {
      shapes.push_back({depth, 1 + width_ * depth});
    }
    return shapes;
  }

  void plan(MemoryPlan& plan, StateCache&, const DraftLimits& limits) override {
    const int64_t bytes = int64_t{4} * limits.max_seqs * (largest_.tree_size - 1);
    tokens_id_ = plan.add("comb.tokens", "state", bytes);
    parents_id_ = plan.add("comb.parents", "state", bytes);
  }
  void bind(const Arena& arena) override {
    tokens_ = arena.array<int>(tokens_id_);
    parents_ = arena.array<int>(parents_id_);
  }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    CHECK(!ctx.device.is_cuda(), "the comb drafter runs on the CPU only");
    CHECK_STATE(fits(batch.shape), "a comb of {} nodes", batch.shape.tree_size);
    const int num_tokens = batch.num_tokens();
    for (int seq = 0; seq < batch.num_seqs; ++seq) {
      const int last = batch.slots.next_tokens[batch.seq_slots[seq]];
      for (int i = 0; i < num_tokens; ++i) {
        const int level = i / width_, beside = i % width_;
        tokens_[seq * num_tokens + i] = (last + beside) % vocab_size_;
        parents_[seq * num_tokens + i] = level == 0 ? 0 : (level - 1) * width_ + 1;
      }
    }
    return {.num_tokens = num_tokens, .tokens = tokens_, .parents = parents_};
  }

 private:
  const DraftShape largest_;
  const int width_, vocab_size_;
  MemoryPlan::Id tokens_id_ = 0, parents_id_ = 0;
  int *tokens_ = nullptr, *parents_ = nullptr;  // [B, M]
};

REGISTER_DRAFTER("comb", CombDrafter);

}  // namespace
