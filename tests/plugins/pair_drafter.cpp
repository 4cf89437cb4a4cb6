// A plugin drafter that combines two others: its tree holds both drafts below one root. It does not
// depend on their kinds. Compiled by tests/unit/test_extension_points.py; CPU only.
#include <algorithm>

#include "speculative/drafter.h"

namespace {

using namespace cpmcu;

class PairDrafter : public Drafter {
 public:
  PairDrafter(const DrafterSpec& spec, const ModelSpec& target) : spec_(spec) {
    CHECK(spec_.parts.size() == 2, "a pair drafter has {} parts, expected 2", spec_.parts.size());
    for (const DrafterSpec& part : spec_.parts) parts_.push_back(make_drafter(part, target));
  }

  DraftShape largest() const override { return spec_.shape; }
  std::vector<DraftShape> shapes() const override {
    const int width = static_cast<int>(parts_.size());
    return smaller_shapes(largest(), [=](int depth) { return 1 + width * depth; });
  }
  int lookahead(int depth) const override {
    return std::max(parts_[0]->lookahead(depth), parts_[1]->lookahead(depth));
  }

  HiddenNeeds needs() const override { return parts_[0]->needs().with(parts_[1]->needs()); }
  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    for (const auto& part : parts_) part->plan(plan, states, limits);
    ids_ = {plan.add("pair.tokens", "state", int64_t{4} * limits.max_seqs * kMaxTreeSize),
            plan.add("pair.parents", "state", int64_t{4} * limits.max_seqs * kMaxTreeSize)};
  }
  void bind(const Arena& arena) override {
    for (const auto& part : parts_) part->bind(arena);
    tokens_ = arena.array<int>(ids_[0]);
    parents_ = arena.array<int>(ids_[1]);
  }
  void list_tensors(WeightTable& table) override {
    for (const auto& part : parts_) part->list_tensors(table);
  }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    for (const auto& part : parts_) part->finish_loading(ctx, target);
  }
  void prefill(const Context& ctx, const DraftPrompt& prompt) override {
    for (const auto& part : parts_) part->prefill(ctx, prompt);
  }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    CHECK(!ctx.device.is_cuda(), "the pair drafter runs on the CPU only");
    const int num_tokens = batch.num_tokens();
    std::fill_n(tokens_, batch.num_seqs * num_tokens, -1);
    std::fill_n(parents_, batch.num_seqs * num_tokens, 0);
    DraftBatch half = batch;
    int used = 0;
    for (const auto& part : parts_) {
      half.shape = part->shrunk({batch.shape.depth, 1 + std::max(1, num_tokens / 2)});
      const Draft draft = part->propose(ctx, half);
      const int count = std::min(draft.num_tokens, num_tokens - used);
      for (int seq = 0; seq < batch.num_seqs; ++seq) {
        for (int i = 0; i < count; ++i) {
          const int from = seq * draft.num_tokens + i, to = seq * num_tokens + used + i;
          // Without parents it is a chain: the parent is the token before.
          const int parent = draft.parents ? draft.parents[from] : i;
          tokens_[to] = draft.tokens[from];
          parents_[to] = parent == 0 ? 0 : parent + used;
        }
      }
      used += count;
    }
    return {.num_tokens = num_tokens, .tokens = tokens_, .parents = parents_};
  }

 private:
  const DrafterSpec spec_;
  std::vector<std::unique_ptr<Drafter>> parts_;
  std::vector<MemoryPlan::Id> ids_;
  int *tokens_ = nullptr, *parents_ = nullptr;  // [B, M]
};

REGISTER_DRAFTER("pair", PairDrafter);

}  // namespace
