// Domino heads: "domino". A DFlash network whose logits a recurrent network corrects, from the
// second drafted token on:
//
//   logits[i] = U[i] + W2 silu(W1 [h[i]; s])
//
// s is the state of a GRU after the root and the i tokens before (kernels/tree/gru_chain.h). It
// reads rows of the target's embedding table. U[i] and h[i] are the block's logits and hidden
// states.
//
// Only the K likeliest tokens of U are corrected. The state depends on all tokens of a path, so no
// lattice holds the scores. A tree grows level by level: the states of all nodes of a level are
// computed at once (kernels/tree/gru_tree.h). So a tree reads the weights as often as a chain does.
// Source: Domino, 2026.
#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/tree/gru_chain.h"
#include "kernels/tree/gru_tree.h"
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
    const int64_t seqs = limits.max_seqs, positions = seqs * largest_.depth, nodes = num_nodes();
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
    // Rows [h; 0] of all positions, then rows [0; s] of all nodes. Zeros are written once.
    padded_id_ = plan.add(spec_.scope + "domino.padded", "state",
                          (positions + nodes) * (width + state_size_) * element);
    arrays_id_ = plan.add(spec_.scope + "domino.arrays", "state",
                          carved_bytes([&](Carver& c) { layout(c); }));
    states_id_ = scratch("domino.states", (seqs + 2 * nodes) * state_size_ * element);
    embedded_id_ = scratch("domino.embedded", nodes * width * element);
    gates_id_ = scratch("domino.gates", 2 * nodes * 3 * state_size_ * 4);
    hidden_id_ = scratch("domino.hidden", (positions + nodes) * projection_size_ * 4);
  }
  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    const DType dtype = model().dtype;
    const int64_t width = parts_.width(), seqs = limits_.max_seqs;
    const int64_t positions = seqs * largest_.depth, nodes = num_nodes();
    from_input_ = arena.tensor(from_input_id_, dtype, {3 * state_size_, width});
    from_state_ = arena.tensor(from_state_id_, dtype, {3 * state_size_, state_size_});
    projection_ = arena.tensor(projection_id_, dtype, {projection_size_, width + state_size_});
    successors_ = arena.tensor(successors_id_, dtype, {target_.vocab_size, projection_size_});
    padded_ = arena.tensor(padded_id_, dtype, {positions + nodes, width + state_size_});
    Carver carver(arena.array<char>(arrays_id_));
    layout(carver);
    states_ = arena.tensor(states_id_, dtype, {seqs + 2 * nodes, state_size_});
    embedded_ = arena.tensor(embedded_id_, dtype, {nodes, width});
    gates_ = arena.tensor(gates_id_, DType::kF32, {2 * nodes, 3 * state_size_});
    hidden_ = arena.tensor(hidden_id_, DType::kF32, {positions + nodes, projection_size_});
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
  void choose(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
              const Draft& draft) override {
    const int64_t positions = candidates.hidden.size(0), columns = padded_.size(1);
    const Tensor rows = padded_.rows(0, positions), fixed = hidden_.rows(0, positions);
    const Tensor out(rows.data(), model().dtype, {positions, parts_.width()});
    gather_rows(ctx, {.out = out, .x = candidates.hidden, .out_stride = columns});
    skinny_gemm(ctx, {.y = fixed, .x = rows, .w = projection_});
    is_chain(batch, draft) ? draft_chain(ctx, batch, candidates, fixed, draft)
                           : draft_tree(ctx, batch, candidates, fixed, draft);
  }

 private:
  // Rows for nodes, at least one for each sequence.
  int64_t num_nodes() const {
    return int64_t{limits_.max_seqs} * std::max(largest_.tree_size - 1, 1);
  }
  void layout(Carver& carver) {
    const int64_t seqs = limits_.max_seqs, nodes = num_nodes(), all = nodes * largest_.depth;
    roots_ = carver.take<int>(seqs);
    tokens_ = carver.take<int>(seqs);
    nodes_.tokens = carver.take<int>(all);
    nodes_.parents = carver.take<int>(all);
    nodes_.scores = carver.take<float>(all);
    state_rows_ = carver.take<int>(nodes);
    scores_ = carver.take<float>(nodes * topk_);
  }

  void draft_chain(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
                   const Tensor& fixed, const Draft& draft) {
    const Tensor state = states_.rows(0, batch.num_seqs);
    ChainStepParams step{.num_seqs = candidates.num_seqs,
                         .depth = candidates.depth,
                         .topk = candidates.topk,
                         .candidates = candidates.ids,
                         .logprobs = candidates.logprobs,
                         .seq_slots = batch.seq_slots,
                         .next_tokens = batch.slots.next_tokens,
                         .successors = successors_,
                         .roots = roots_,
                         .tokens = tokens_,
                         .draft = draft};
    for (int level = 0; level < draft.num_tokens; ++level) {
      if (level == 1) read_tokens(ctx, roots_, state, true);
      if (level > 0) {
        read_tokens(ctx, tokens_, state, false);
        step.fixed = fixed;
        step.moving = project(ctx, batch.num_seqs);
      }
      step.level = level;
      chain_step(ctx, step);
    }
  }

  void draft_tree(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
                  const Tensor& fixed, const Draft& draft) {
    NodeRows rows = nodes_;
    rows.num_seqs = batch.num_seqs;
    rows.num_rows = draft.num_tokens;
    const int64_t num_rows = int64_t{batch.num_seqs} * draft.num_tokens;
    NodeScoresParams step{.rows = rows,
                          .depth = candidates.depth,
                          .topk = candidates.topk,
                          .candidates = candidates.ids,
                          .logprobs = candidates.logprobs,
                          .successors = successors_,
                          .scores = scores_,
                          .seq_slots = batch.seq_slots,
                          .next_tokens = batch.slots.next_tokens,
                          .roots = roots_};
    // The states of the roots, then those of two levels in turn.
    Tensor before = states_.rows(0, batch.num_seqs);
    for (int level = 0; level < batch.shape.depth; ++level) {
      if (level == 1) read_tokens(ctx, roots_, before, true);
      if (level > 0) {
        const Tensor state =
            states_.rows(limits_.max_seqs + (level % 2 == 0 ? 0 : num_nodes()), num_rows);
        gather_rows(ctx, {.out = state, .x = before, .index = state_rows_});
        read_tokens(ctx, rows.tokens + rows.at(level - 1, 0, 0), state, false);
        step.fixed = fixed;
        step.moving = project(ctx, num_rows);
        before = state;
      }
      step.level = level;
      node_scores(ctx, step);
      node_rows(ctx, {.rows = rows,
                      .depth = candidates.depth,
                      .topk = candidates.topk,
                      .level = level,
                      .candidates = candidates.ids,
                      .scores = scores_,
                      .state_rows = state_rows_});
    }
    node_draft(ctx, {.rows = rows, .depth = batch.shape.depth, .draft = draft});
  }

  // Advances states by a token each and copies them to the rows [0; s]. `is_first`: the states are
  // 0.
  void read_tokens(const Context& ctx, const int* ids, const Tensor& state, bool is_first) {
    const int64_t count = state.size(0);
    const Tensor x = embedded_.rows(0, count), from_input = gates_.rows(0, count);
    const Tensor from_state = is_first ? Tensor{} : gates_.rows(num_nodes(), count);
    embedding(ctx, {.out = x, .table = parts_.embedding_table(), .ids = ids});
    skinny_gemm(ctx, {.y = from_input, .x = x, .w = from_input_});
    if (!is_first) skinny_gemm(ctx, {.y = from_state, .x = state, .w = from_state_});
    const Tensor rows = state_inputs(count);
    char* const copy = rows.as<char>() + parts_.width() * size_of(model().dtype);
    gru_cell(ctx, {.from_input = from_input,
                   .from_state = from_state,
                   .state = state,
                   .copy = Tensor(copy, model().dtype, {count, state_size_}),
                   .copy_stride = padded_.size(1)});
  }
  // The first `count` rows [0; s].
  Tensor state_inputs(int64_t count) const {
    return padded_.rows(padded_.size(0) - num_nodes(), count);
  }
  // W1 times these rows, [count, P].
  Tensor project(const Context& ctx, int64_t count) const {
    const Tensor moving = hidden_.rows(hidden_.size(0) - num_nodes(), count);
    skinny_gemm(ctx, {.y = moving, .x = state_inputs(count), .w = projection_});
    return moving;
  }

  const int64_t state_size_, projection_size_;  // sizes G and P
  MemoryPlan::Id from_input_id_ = 0, from_state_id_ = 0, projection_id_ = 0, successors_id_ = 0,
                 padded_id_ = 0, arrays_id_ = 0, states_id_ = 0, embedded_id_ = 0, gates_id_ = 0,
                 hidden_id_ = 0;
  Tensor from_input_, from_state_;  // weights of the GRU: [3 G, H] and [3 G, G]
  Tensor projection_, successors_;  // W1 [P, H + G], W2 [V, P]
  // Rows for `nodes` nodes of all sequences, and for positions, max_seqs D.
  Tensor padded_;            // [positions + nodes, H + G]
  Tensor hidden_;            // [positions + nodes, P]: W1 times these rows
  Tensor states_;            // [max_seqs + 2 nodes, G]
  Tensor embedded_, gates_;  // [nodes, H] and [2 nodes, 3 G]
  // [max_seqs] each: the roots, and a chain's chosen tokens.
  int *roots_ = nullptr, *tokens_ = nullptr;
  NodeRows nodes_;
  int* state_rows_ = nullptr;  // [nodes]
  float* scores_ = nullptr;    // [nodes, K]
};

REGISTER_DRAFTER("domino", DominoDrafter);

}  // namespace
}  // namespace cpmcu
