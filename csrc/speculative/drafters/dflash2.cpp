// DFlash2 heads: "dflash2". Two parts are added to DFlash.
//
// A convolution over the rows of the block is before and after each attention and MLP
// (kernels/layer/block_conv.h).
//
// A selector scores candidate b below candidate a: U(b) + sum_i A[a, i] * (W h)[i] * B[b, i]. U are
// the head's logits, h is the hidden state that gave U, and A and B are codebooks.
#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

class DFlash2Drafter : public BlockDrafter {
 public:
  DFlash2Drafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "DFlash2", {"rank"}),
        codebooks_(spec_.scope + "candidate_selector.predecessor_codebook",
                   spec_.scope + "candidate_selector.successor_codebook",
                   spec.options.integer("rank", 256), target.vocab_size),
        gate_(parts_.add_linear(spec_.scope + "candidate_selector.hidden_projection",
                                parts_.width(), codebooks_.rank())) {}

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BlockDrafter::plan(plan, states, limits);
    num_rows_of_gates_ = int64_t{limits.max_seqs} * largest_.depth;
    codebooks_.plan(plan, target_, model().dtype, num_rows_of_gates_, topk_);
    gates_id_ = plan.add_scratch(spec_.scope + "gates",
                                 num_rows_of_gates_ * codebooks_.rank() * size_of(model().dtype),
                                 kSample, kSample);
  }
  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    codebooks_.bind(arena);
    gates_ = arena.tensor(gates_id_, model().dtype, {num_rows_of_gates_, codebooks_.rank()});
  }
  void list_tensors(WeightTable& table) override {
    BlockDrafter::list_tensors(table);
    codebooks_.list_tensors(table);
  }

 protected:
  Lattice score(const Context& ctx, const DraftBatch& batch,
                const Candidates& candidates) override {
    const Tensor gates = gates_.rows(0, candidates.hidden.size(0));
    gate_->forward(ctx, Phase::kDecode, gates, candidates.hidden, 1, 0);
    return codebooks_.score(ctx, {.block = block_of(batch, candidates), .gates = gates});
  }

 private:
  Codebooks codebooks_;
  LinearMethod* gate_;
  int64_t num_rows_of_gates_ = 0;
  MemoryPlan::Id gates_id_ = 0;
  Tensor gates_;  // [max_seqs D, r]: gates of pair_scores
};

REGISTER_DRAFTER("dflash2", DFlash2Drafter);

}  // namespace
}  // namespace cpmcu
