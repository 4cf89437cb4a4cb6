// Fill: "fill". Another drafter drafts, and a path from the context (prompt and output) joins its
// draft. The best tokens of both are kept, so a path of a long match replaces tokens of the draft.
// A path of a short match gets the nodes that the draft leaves (kernels/tree/draft_fill.h).
#include <algorithm>

#include "core/carver.h"
#include "kernels/tree/draft_fill.h"
#include "speculative/drafter.h"

namespace cpmcu {
namespace {

class FillDrafter : public Drafter {
 public:
  FillDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : spec_(spec),
        min_ngram_(spec.options.integer("min_ngram", 1)),
        max_ngram_(spec.options.integer("max_ngram", 4)) {
    spec.options.check_known("fill", {"min_ngram", "max_ngram"});
    CHECK(spec.parts.size() == 1, "the drafter \"fill\" has {} parts, expected 1",
          spec.parts.size());
    CHECK(min_ngram_ >= 1 && min_ngram_ <= max_ngram_ && max_ngram_ <= kMaxNgram,
          "n-grams have {} to {} tokens, expected 1 to {}", min_ngram_, max_ngram_, kMaxNgram);
    part_ = make_drafter(spec.parts[0], target);
    CHECK(part_->largest().depth <= spec.shape.depth,
          "a draft of depth {} is filled up to depth {}", part_->largest().depth, spec.shape.depth);
  }

  DraftShape largest() const override { return spec_.shape; }
  bool fits(const DraftShape& shape) const override { return part_->shrunk(shape).depth > 0; }
  // Shapes of the part's draft, with room for a path of the same depth.
  std::vector<DraftShape> shapes() const override {
    std::vector<DraftShape> shapes = smaller_shapes(spec_.shape, [this](int depth) {
      return std::max(part_->shrunk({depth, spec_.shape.tree_size}).tree_size, depth + 1);
    });
    std::erase_if(shapes, [this](const DraftShape& shape) { return !fits(shape); });
    return shapes;
  }

  HiddenNeeds needs() const override { return part_->needs(); }
  // A path of the context may be accepted instead of the part's.
  int num_recent(int depth) const override {
    return part_->num_recent(std::max(depth, part_->largest().depth + 1));
  }
  int lookahead(int depth) const override { return part_->lookahead(depth); }
  int num_rewritten() const override { return part_->num_rewritten(); }
  const InnerCounts* inner_counts() const override { return part_->inner_counts(); }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    limits_ = limits;
    part_->plan(plan, states, limits);
    buffer_id_ = plan.add("fill.arrays", "state", carved_bytes([&](Carver& c) { layout(c); }));
  }

  void bind(const Arena& arena) override {
    part_->bind(arena);
    buffer_ = arena.array<char>(buffer_id_);
    Carver carver(buffer_);
    layout(carver);
    num_bytes_ = carver.num_bytes();
  }

  void list_tensors(WeightTable& table) override { part_->list_tensors(table); }
  WeightTable divided_tensors() const override { return part_->divided_tensors(); }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    fill_bytes(ctx.device, buffer_, 0, num_bytes_, ctx.stream);
    part_->finish_loading(ctx, target);
  }

  void prefill(const Context& ctx, const DraftPrompt& prompt) override {
    part_->prefill(ctx, prompt);
  }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    fill_observe(ctx, {.num_seqs = batch.num_seqs,
                       .seq_slots = batch.seq_slots,
                       .slots = batch.slots,
                       .paths = paths_,
                       .rates = rates_});
    DraftBatch part = batch;
    part.shape = part_->shrunk(batch.shape);
    const Draft draft = part_->propose(ctx, part);
    if (batch.num_tokens() == 0) return draft;
    Draft filled = filled_;
    filled.num_tokens = batch.num_tokens();
    draft_fill(ctx, {.num_seqs = batch.num_seqs,
                     .seq_slots = batch.seq_slots,
                     .slots = batch.slots,
                     .draft = draft,
                     .max_depth = batch.shape.depth,
                     .min_ngram = min_ngram_,
                     .max_ngram = max_ngram_,
                     .rates = rates_,
                     .paths = paths_,
                     .filled = filled});
    return filled;
  }

 private:
  void layout(Carver& carver) {
    const int64_t tokens = int64_t{limits_.max_seqs} * (spec_.shape.tree_size - 1);
    filled_ = {.tokens = carver.take<int>(tokens),
               .parents = carver.take<int>(tokens),
               .scores = carver.take<float>(tokens)};
    rates_ = {.hits = carver.take<float>(kMaxNgram + 1),
              .trials = carver.take<float>(kMaxNgram + 1)};
    paths_ = carver.take<FillPath>(limits_.max_slots);
  }

  const DrafterSpec spec_;
  const int min_ngram_, max_ngram_;
  std::unique_ptr<Drafter> part_;
  DraftLimits limits_;
  MemoryPlan::Id buffer_id_ = 0;
  char* buffer_ = nullptr;
  int64_t num_bytes_ = 0;
  Draft filled_;               // [B, N - 1]: the filled drafts
  FillRates rates_;            // rates that all sequences share
  FillPath* paths_ = nullptr;  // [slots]
};

REGISTER_DRAFTER("fill", FillDrafter);

}  // namespace
}  // namespace cpmcu
