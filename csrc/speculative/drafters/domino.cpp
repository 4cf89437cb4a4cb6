// Domino heads: "domino". A DFlash network whose logits a recurrent network corrects, from the
// second drafted token on:
//
//   logits[i] = U[i] + W2 silu(W1 [h[i]; s])
//
// s is the state of a GRU after the root and the i tokens before (kernels/tree/gru_chain.h). It
// reads rows of the target's embedding table. U[i] and h[i] are the block's logits and hidden
// states.
//
// The state depends on all tokens of a path, so the draft is a chain. Only the K likeliest tokens
// of U are corrected. Source: Domino, 2026.
#include "kernels/gemm/gemm.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/tree/gru_chain.h"
#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

class DominoDrafter : public BlockDrafter {
 public:
  // Options: `state_size` G and `projection_size` P.
  DominoDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "Domino", {"state_size", "projection_size"}),
        state_size_(spec.options.integer("state_size", 0)),
        projection_size_(spec.options.integer("projection_size", 0)) {
    CHECK(state_size_ >= 8 && state_size_ % 8 == 0 && projection_size_ >= 8 &&
              projection_size_ % 8 == 0,
          "the draft has a state of {} and a projection of {} values, expected multiples of 8",
          state_size_, projection_size_);
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BlockDrafter::plan(plan, states, limits);
    const int64_t element = size_of(model().dtype), width = parts_.width();
    const int64_t seqs = limits.max_seqs, positions = seqs * largest_.depth;
    const auto weights = [&](const char* name, int64_t elements) {
      return plan.add(spec_.scope + name, "weights", elements * element);
    };
    const auto scratch = [&](const char* name, int64_t bytes) {
      return plan.add_scratch(spec_.scope + name, bytes, kSample, kSample);
    };
    from_input_id_ = weights("prefix_gru.weight_ih_l0", 3 * state_size_ * width);
    from_state_id_ = weights("prefix_gru.weight_hh_l0", 3 * state_size_ * state_size_);
    projection_id_ = weights("embed_proj.0.weight", projection_size_ * (width + state_size_));
    successors_id_ = weights("embed_proj.2.weight", target_.vocab_size * projection_size_);
    // Rows [h; 0] of all positions, then rows [0; s] of all sequences. Zeros are written once.
    padded_id_ = plan.add(spec_.scope + "domino.padded", "state",
                          (positions + seqs) * (width + state_size_) * element);
    ids_id_ = plan.add(spec_.scope + "domino.ids", "state", 2 * 4 * seqs);
    state_id_ = scratch("domino.state", seqs * state_size_ * element);
    embedded_id_ = scratch("domino.embedded", seqs * width * element);
    gates_id_ = scratch("domino.gates", 2 * seqs * 3 * state_size_ * 4);
    hidden_id_ = scratch("domino.hidden", (positions + seqs) * projection_size_ * 4);
  }
  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    const DType dtype = model().dtype;
    const int64_t width = parts_.width(), seqs = limits_.max_seqs;
    const int64_t positions = seqs * largest_.depth;
    from_input_ = arena.tensor(from_input_id_, dtype, {3 * state_size_, width});
    from_state_ = arena.tensor(from_state_id_, dtype, {3 * state_size_, state_size_});
    projection_ = arena.tensor(projection_id_, dtype, {projection_size_, width + state_size_});
    successors_ = arena.tensor(successors_id_, dtype, {target_.vocab_size, projection_size_});
    padded_ = arena.tensor(padded_id_, dtype, {positions + seqs, width + state_size_});
    roots_ = arena.array<int>(ids_id_);
    state_ = arena.tensor(state_id_, dtype, {seqs, state_size_});
    embedded_ = arena.tensor(embedded_id_, dtype, {seqs, width});
    gates_ = arena.tensor(gates_id_, DType::kF32, {2 * seqs, 3 * state_size_});
    hidden_ = arena.tensor(hidden_id_, DType::kF32, {positions + seqs, projection_size_});
  }
  void list_tensors(WeightTable& table) override {
    BlockDrafter::list_tensors(table);
    table.add(spec_.scope + "prefix_gru.weight_ih_l0", from_input_);
    table.add(spec_.scope + "prefix_gru.weight_hh_l0", from_state_);
    table.add(spec_.scope + "embed_proj.0.weight", projection_);
    table.add(spec_.scope + "embed_proj.2.weight", successors_);
  }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BlockDrafter::finish_loading(ctx, target);
    fill_bytes(ctx.device, padded_.data(), 0, padded_.num_bytes(), ctx.stream);
  }

 protected:
  int most_nodes(int depth) const override { return depth + 1; }

  void choose(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
              const Draft& draft) override {
    const int64_t positions = candidates.hidden.size(0), all = padded_.size(0) - limits_.max_seqs;
    const int64_t columns = padded_.size(1);
    const Tensor rows = padded_.rows(0, positions), fixed = hidden_.rows(0, positions);
    const Tensor out(rows.data(), model().dtype, {positions, parts_.width()});
    gather_rows(ctx, {.out = out, .x = candidates.hidden, .out_stride = columns});
    skinny_gemm(ctx, {.y = fixed, .x = rows, .w = projection_});
    const Tensor states = padded_.rows(all, batch.num_seqs);
    const Tensor moving = hidden_.rows(all, batch.num_seqs);
    int* const tokens = roots_ + limits_.max_seqs;
    ChainStepParams step{.num_seqs = candidates.num_seqs,
                         .depth = candidates.depth,
                         .topk = candidates.topk,
                         .candidates = candidates.ids,
                         .logprobs = candidates.logprobs,
                         .seq_slots = batch.seq_slots,
                         .next_tokens = batch.slots.next_tokens,
                         .successors = successors_,
                         .roots = roots_,
                         .tokens = tokens,
                         .draft = draft};
    for (int level = 0; level < draft.num_tokens; ++level) {
      if (level > 0) {
        read_token(ctx, level == 1 ? roots_ : tokens, batch.num_seqs, level == 1);
        if (level == 1) read_token(ctx, tokens, batch.num_seqs, false);
        skinny_gemm(ctx, {.y = moving, .x = states, .w = projection_});
        step.fixed = fixed;
        step.moving = moving;
      }
      step.level = level;
      chain_step(ctx, step);
    }
  }

 private:
  // Advances the states of B sequences by a token each. `is_first`: the states are 0.
  void read_token(const Context& ctx, const int* ids, int num_seqs, bool is_first) {
    const Tensor x = embedded_.rows(0, num_seqs), state = state_.rows(0, num_seqs);
    const Tensor from_input = gates_.rows(0, num_seqs);
    const Tensor from_state = is_first ? Tensor{} : gates_.rows(limits_.max_seqs, num_seqs);
    embedding(ctx, {.out = x, .table = parts_.embedding_table(), .ids = ids});
    skinny_gemm(ctx, {.y = from_input, .x = x, .w = from_input_});
    if (!is_first) skinny_gemm(ctx, {.y = from_state, .x = state, .w = from_state_});
    const Tensor rows = padded_.rows(padded_.size(0) - limits_.max_seqs, num_seqs);
    char* const copy = rows.as<char>() + parts_.width() * size_of(model().dtype);
    gru_cell(ctx, {.from_input = from_input,
                   .from_state = from_state,
                   .state = state,
                   .copy = Tensor(copy, model().dtype, {num_seqs, state_size_}),
                   .copy_stride = padded_.size(1)});
  }

  const int64_t state_size_, projection_size_;  // G, P
  MemoryPlan::Id from_input_id_ = 0, from_state_id_ = 0, projection_id_ = 0, successors_id_ = 0,
                 padded_id_ = 0, ids_id_ = 0, state_id_ = 0, embedded_id_ = 0, gates_id_ = 0,
                 hidden_id_ = 0;
  Tensor from_input_, from_state_;   // of the GRU: [3 G, H], [3 G, G]
  Tensor projection_, successors_;   // W1 [P, H + G], W2 [V, P]
  Tensor padded_;                    // [max_seqs (D + 1), H + G]
  Tensor state_, embedded_, gates_;  // [max_seqs, G], [max_seqs, H], [2 max_seqs, 3 G]
  Tensor hidden_;                    // [max_seqs (D + 1), P]: of all positions, then of states
  int* roots_ = nullptr;             // [2, max_seqs]: the roots, then the chosen tokens
};

REGISTER_DRAFTER("domino", DominoDrafter);

}  // namespace
}  // namespace cpmcu
