// DSpark heads: "dspark". A low-rank bigram (the Markov head) is added to a DFlash network whose
// root row predicts, too: the logit of token b below a is U(b) + W2[b] . W1[a].
//
// The engine adds the bigram only to the K likeliest tokens of U; the others keep U. Source:
// DSpark, DeepSeek-AI's DeepSpec, 2026.
//
// A gated Markov head multiplies W1[a] by sigmoid(G [h; W1[a]] + bias). h is the hidden state that
// gave U. Scores still depend on the parent and the position alone, so a lattice holds them. G's
// columns of W1[a] are multiplied by all rows of W1 once, at load: a table [V, r].
//
// An rnn Markov head has a state that depends on all tokens of a path. A lattice cannot hold its
// scores below depth 1, so rnn_tree computes them when it takes a node (kernels/tree/rnn_tree.h).
#include <numeric>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/add_bias.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/tree/rnn_tree.h"
#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

class DSparkDrafter : public BlockDrafter {
 public:
  DSparkDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "DSpark", {"rank", "successors", "gated", "rnn"}),
        num_successors_(spec.options.integer("successors", target.vocab_size)),
        codebooks_(spec_.scope + "markov_head.markov_w1.weight",
                   spec_.scope + "markov_head.markov_w2.weight", spec.options.integer("rank", 256),
                   num_successors_),
        gated_(spec.options.flag("gated", false)),
        rnn_(spec.options.flag("rnn", false)) {
    const auto drafted = vocab_ids_.empty() ? target.vocab_size : std::ssize(vocab_ids_);
    CHECK(num_successors_ == drafted || num_successors_ == target.vocab_size,
          "the draft's markov_w2 has {} rows, expected {}, a row for each drafted token",
          num_successors_, drafted);
    const int rank = codebooks_.rank();
    CHECK(!rnn_ || (rank % 8 == 0 && rank <= kMaxRnnRank),
          "the draft's rnn Markov head has rank {}, expected a multiple of 8, at most {}", rank,
          kMaxRnnRank);
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BlockDrafter::plan(plan, states, limits);
    num_gates_ = int64_t{limits.max_seqs} * largest_.depth;
    codebooks_.plan(plan, target_, model().dtype, num_gates_, topk_);
    if (rnn_) plan_rnn(plan);
    if (!gated_) return;
    const int64_t element = size_of(model().dtype), rank = codebooks_.rank();
    const int64_t width = parts_.width();
    const auto weights = [&](const char* name, int64_t elements) {
      return plan.add(gate_name() + name, "weights", elements * element);
    };
    joint_id_ = weights("weight", rank * (width + rank));
    bias_id_ = weights("bias", rank);
    left_id_ = weights("left", rank * width);
    right_id_ = weights("right", rank * rank);
    table_id_ = weights("table", target_.vocab_size * rank);
    index_id_ = plan.add(gate_name() + "index", "weights", 4 * rank * (width + rank) / piece());
    gates_id_ =
        plan.add_scratch(gate_name() + "gates", num_gates_ * rank * element, kSample, kSample);
  }
  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    codebooks_.bind(arena);
    const DType dtype = model().dtype;
    const int64_t rank = codebooks_.rank(), width = parts_.width();
    if (rnn_) {
      joint_ = arena.tensor(joint_id_, dtype, {3 * rank, rnn_columns()});
      bias_ = arena.tensor(bias_id_, dtype, {3 * rank});
      padded_ = arena.tensor(padded_id_, dtype, {num_gates_, rnn_columns()});
      inputs_ = arena.tensor(inputs_id_, DType::kF32, {num_gates_, 3 * rank});
      states_ = arena.tensor(states_id_, DType::kF32, {num_states(), rank});
    }
    if (!gated_) return;
    joint_ = arena.tensor(joint_id_, dtype, {rank, width + rank});
    bias_ = arena.tensor(bias_id_, dtype, {rank});
    left_ = arena.tensor(left_id_, dtype, {rank, width});
    right_ = arena.tensor(right_id_, dtype, {rank, rank});
    table_ = arena.tensor(table_id_, dtype, {target_.vocab_size, rank});
    index_ = arena.array<int>(index_id_);
    gates_ = arena.tensor(gates_id_, dtype, {num_gates_, rank});
  }
  void list_tensors(WeightTable& table) override {
    BlockDrafter::list_tensors(table);
    codebooks_.list_tensors(table);
    if (!gated_ && !rnn_) return;
    table.add(gate_name() + "weight", joint_);
    table.add(gate_name() + "bias", bias_);
  }
  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BlockDrafter::finish_loading(ctx, target);
    if (gated_) split_gate(ctx);
    if (rnn_) fill_bytes(ctx.device, padded_.data(), 0, padded_.num_bytes(), ctx.stream);
  }

 protected:
  // If the draft's own vocabulary is smaller, markov_w2 has a row for each of its tokens. With
  // FR-Spec, markov_w2 has a row for each token of the target.
  bool own_ids() const override { return num_successors_ != target_.vocab_size; }

  Lattice score(const Context& ctx, const DraftBatch& batch,
                const Candidates& candidates) override {
    PairScoresParams params{.block = block_of(batch, candidates), .keeps_rest = true};
    if (gated_) {
      params.gates = gates_.rows(0, candidates.hidden.size(0));
      params.predecessor_gates = table_;
      skinny_gemm(ctx, {.y = params.gates, .x = candidates.hidden, .w = left_});
      add_bias(ctx, {.y = params.gates, .bias = bias_.view({1, bias_.size(0)})});
    }
    return codebooks_.score(ctx, params);
  }

  void choose(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
              const Draft& draft) override {
    if (!rnn_) return BlockDrafter::choose(ctx, batch, candidates, draft);
    const int64_t rows = candidates.hidden.size(0), rank = codebooks_.rank();
    const int64_t first = 2 * rank * size_of(model().dtype);
    const Tensor columns(padded_.as<char>() + first, model().dtype, {rows, parts_.width()});
    gather_rows(ctx, {.out = columns, .x = candidates.hidden, .out_stride = rnn_columns()});
    const Tensor inputs = inputs_.rows(0, rows);
    skinny_gemm(ctx, {.y = inputs, .x = padded_.rows(0, rows), .w = joint_});
    add_bias(ctx, {.y = inputs, .bias = bias_.view({1, 3 * rank})});
    rnn_tree(ctx, {.block = block_of(batch, candidates),
                   .inputs = inputs,
                   .weight = joint_,
                   .predecessors = codebooks_.predecessors(),
                   .successors = codebooks_.successors(),
                   .states = states_,
                   .longest = batch.shape.depth,
                   .chain = is_chain(batch, draft),
                   .draft = draft});
  }

 private:
  std::string gate_name() const {
    return spec_.scope + (rnn_ ? "markov_head.joint_proj." : "markov_head.gate_proj.");
  }
  // Columns of the rnn's matrix: of the state, of W1[a], and of h.
  int64_t rnn_columns() const { return 2 * codebooks_.rank() + parts_.width(); }
  int64_t num_states() const { return int64_t{limits_.max_seqs} * kMaxTreeSize; }

  void plan_rnn(MemoryPlan& plan) {
    const int64_t element = size_of(model().dtype), rank = codebooks_.rank();
    joint_id_ = plan.add(gate_name() + "weight", "weights", 3 * rank * rnn_columns() * element);
    bias_id_ = plan.add(gate_name() + "bias", "weights", 3 * rank * element);
    padded_id_ = plan.add(gate_name() + "padded", "state", num_gates_ * rnn_columns() * element);
    const auto scratch = [&](const char* name, int64_t floats) {
      return plan.add_scratch(gate_name() + name, 4 * floats, kSample, kSample);
    };
    inputs_id_ = scratch("inputs", num_gates_ * 3 * rank);
    states_id_ = scratch("states", num_states() * rank);
  }
  // A row of the gate's matrix is cut into pieces of this length, which divides both H and r.
  int64_t piece() const { return std::gcd(parts_.width(), int64_t{codebooks_.rank()}); }

  // Copies the gate's columns of h and its columns of W1[a] to two matrices, and computes the
  // table.
  void split_gate(const Context& ctx) {
    const int64_t rank = codebooks_.rank(), lefts = parts_.width() / piece();
    const int64_t columns = lefts + rank / piece();
    std::vector<int> index;
    for (int64_t i = 0; i < rank * lefts; ++i) {
      index.push_back(static_cast<int>(i / lefts * columns + i % lefts));
    }
    const int64_t rights = columns - lefts, num_lefts = std::ssize(index);
    for (int64_t i = 0; i < rank * rights; ++i) {
      index.push_back(static_cast<int>(i / rights * columns + lefts + i % rights));
    }
    copy_to_device(ctx.device, index_, index.data(), 4 * std::ssize(index), ctx.stream);
    const Tensor pieces = joint_.view({rank * columns, piece()});
    gather_rows(ctx, {.out = left_.view({num_lefts, piece()}), .x = pieces, .index = index_});
    gather_rows(
        ctx,
        {.out = right_.view({rank * rights, piece()}), .x = pieces, .index = index_ + num_lefts});
    skinny_gemm(ctx, {.y = table_, .x = codebooks_.predecessors(), .w = right_});
    synchronize(ctx.device, ctx.stream);  // the index lies in pageable memory
  }

  const int num_successors_;
  Codebooks codebooks_;
  const bool gated_, rnn_;
  int64_t num_gates_ = 0;
  MemoryPlan::Id joint_id_ = 0, bias_id_ = 0, left_id_ = 0, right_id_ = 0, table_id_ = 0,
                 index_id_ = 0, gates_id_ = 0, padded_id_ = 0, inputs_id_ = 0, states_id_ = 0;
  Tensor joint_, bias_;  // G [r, H + r] and its bias [r]; of an rnn, [3 r, 2 r + H] and [3 r]
  // The columns of G that multiply h [r, H], and those that multiply W1[a] [r, r].
  Tensor left_, right_;
  Tensor table_, gates_;  // [V, r] and [max_seqs D, r]
  // Only for an rnn. padded_: rows [0; 0; h] of 2 r + H values. inputs_: joint_ times these rows.
  // states_ belong to nodes.
  Tensor padded_, inputs_, states_;
  int* index_ = nullptr;  // pieces of rows of joint_: first those of left_, then those of right_
};

REGISTER_DRAFTER("dspark", DSparkDrafter);

}  // namespace
}  // namespace cpmcu
