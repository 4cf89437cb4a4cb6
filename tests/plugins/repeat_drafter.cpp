// A drafter from outside the package: it proposes the last token again and again. Compiled by
// tests/unit/test_extension_points.py as a plugin, and explained in docs/adding_drafter.md.
#include "speculative/drafter.h"

namespace {

using namespace cpmcu;

class RepeatDrafter : public Drafter {
 public:
  RepeatDrafter(const DrafterSpec& spec, const ModelSpec&) : spec_(spec) {}

  void plan(MemoryPlan& plan, const DraftLimits& limits) override {
    chain_id_ = plan.add("repeat.chain", "state", int64_t{4} * limits.max_seqs * spec_.depth);
  }
  void bind(const Arena& arena) override { chain_ = arena.array<int>(chain_id_); }

  void propose(const Context& ctx, const DraftBatch& batch) override {
    CHECK(!ctx.device.is_cuda(), "the repeat drafter runs on the CPU only");
    const int num_tokens = batch.trees.num_nodes - 1;  // node 0 is the last token itself
    for (int seq = 0; seq < batch.num_seqs; ++seq) {
      const int last = batch.slots.next_tokens[batch.seq_slots[seq]];
      for (int i = 0; i < num_tokens; ++i) chain_[seq * num_tokens + i] = last;
    }
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

REGISTER_DRAFTER("repeat", RepeatDrafter);

}  // namespace
