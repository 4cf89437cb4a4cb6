// A plugin drafter that proposes the last token at every position. Compiled by
// tests/unit/test_extension_points.py and explained in docs/adding_drafter.md.
#include "speculative/drafter.h"

namespace {

using namespace cpmcu;

class RepeatDrafter : public ChainDrafter {
 public:
  RepeatDrafter(const DrafterSpec& spec, const ModelSpec&) : ChainDrafter(spec.shape) {}

  void plan(MemoryPlan& plan, StateCache&, const DraftLimits& limits) override {
    chain_id_ = plan.add("repeat.chain", "state", int64_t{4} * limits.max_seqs * largest().depth);
  }
  void bind(const Arena& arena) override { chain_ = arena.array<int>(chain_id_); }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    CHECK(!ctx.device.is_cuda(), "the repeat drafter runs on the CPU only");
    const int num_tokens = batch.num_tokens();
    for (int seq = 0; seq < batch.num_seqs; ++seq) {
      const int last = batch.slots.next_tokens[batch.seq_slots[seq]];
      for (int i = 0; i < num_tokens; ++i) chain_[seq * num_tokens + i] = last;
    }
    return {.num_tokens = num_tokens, .tokens = chain_};  // without parents: a chain
  }

 private:
  MemoryPlan::Id chain_id_ = 0;
  int* chain_ = nullptr;  // [B, M]
};

REGISTER_DRAFTER("repeat", RepeatDrafter);

}  // namespace
