// A drafter that proposes a whole block in one pass. It is a small network with two kinds of rows:
//
//   row      input                                      does
//   context  c = norm(fc [hidden states of m target     stores keys and values of each layer
//            layers]) of a token that is cached
//   block    the root's embedding, then mask            attends to the context and to the block;
//            embeddings, at positions L, L + 1, ...     its result gives the logits of one position
//
// The logits of D positions form a lattice (kernels/tree/lattice.h), from which the draft is a
// chain or a tree. The drafters differ in the scores of candidates (`score`), and DFlash2 adds
// convolutions. If scores depend on whole paths, no lattice holds them: the drafter overrides
// `choose`.
//
// Keys of block rows lie beyond the sequence's length and are written again by each step. A
// rejected token leaves nothing behind: context rows come from accepted tokens alone. Source:
// DFlash, arXiv:2602.06036.
#pragma once

#include <string>
#include <vector>

#include "core/carver.h"
#include "kernels/tree/lattice.h"
#include "kernels/tree/mtp_rows.h"
#include "speculative/drafter.h"
#include "speculative/head_parts.h"

namespace cpmcu {

class BlockDrafter : public Drafter {
 public:
  HiddenNeeds needs() const override { return {.layers = target_layers_}; }
  DraftShape largest() const override { return largest_; }
  bool fits(const DraftShape& shape) const override {
    return shape.tree_size <= most_nodes(shape.depth);
  }
  std::vector<DraftShape> shapes() const override {
    return smaller_shapes(largest_, [this](int depth) { return most_nodes(depth); });
  }
  DraftShape shrunk(const DraftShape& limit) const override;
  // Number of last tokens whose context rows each draft stores again. Steps without a draft store
  // none. If such steps emit at most this many tokens, they leave no gap.
  int num_recent(int depth) const override { return std::max(depth + 1, kRepaired); }
  int num_rewritten() const override { return limits_.max_path; }
  int lookahead(int depth) const override { return std::max(num_rows_, num_recent(depth)); }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void list_tensors(WeightTable& table) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;
  void prefill(const Context& ctx, const DraftPrompt& prompt) override;
  Draft propose(const Context& ctx, const DraftBatch& batch) override;

 protected:
  // Options of all block drafters, beside those of `own`:
  //
  //   option              meaning
  //   target_layers       the target layers whose inputs are read, in the order of fc's columns
  //   block_size          rows of a block
  //   predicts_from       the first row whose logits count: 0 if the root's row predicts, else 1
  //   mask_id             the id of the rows after the root
  //   mask_embedding      these rows have an embedding of their own
  //   causal_layers       layers in which a row sees no later rows of its block
  //   topk                candidates of a position, K
  //   vocab_ids, own_head as in DraftHead
  //   conv_width, conv_group  a convolution around each attention and each MLP; width 0: none
  BlockDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
               const std::vector<std::string>& own = {});

  // The candidates of B sequences at D positions.
  struct Candidates {
    int num_seqs = 0, depth = 0, topk = 0;
    const int* ids = nullptr;         // [B, D, K]: ids of the target, or of the draft if own_ids()
    const float* logprobs = nullptr;  // [B, D, K]
    Tensor hidden{};                  // [B D, H]: hidden states after the final norm
  };
  // Without pairs the score of a candidate is its log-probability below any parent.
  virtual Lattice score(const Context&, const DraftBatch&, const Candidates& candidates) {
    return {.num_seqs = candidates.num_seqs,
            .depth = candidates.depth,
            .topk = candidates.topk,
            .tokens = candidates.ids,
            .scores = candidates.logprobs};
  }
  // Called before `score`: row last_rows[b] of `rows` [T, H] is the context row of the last cached
  // token of sequence b.
  virtual void keep_context(const Context&, const Tensor& /*rows*/, const int* /*last_rows*/,
                            int /*num_seqs*/) {}
  // Chooses the chain or tree among the candidates.
  virtual void choose(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
                      const Draft& draft);
  static bool is_chain(const DraftBatch& batch, const Draft& draft) {
    return draft.num_tokens <= batch.shape.depth;
  }
  BlockCandidates block_of(const DraftBatch& batch, const Candidates& candidates) const {
    return {.num_seqs = candidates.num_seqs,
            .depth = candidates.depth,
            .topk = candidates.topk,
            .ids = candidates.ids,
            .logprobs = candidates.logprobs,
            .id_map = own_id_map(),
            .seq_slots = batch.seq_slots,
            .next_tokens = batch.slots.next_tokens};
  }
  // Whether Candidates::ids are ids of the draft's own vocabulary.
  virtual bool own_ids() const { return false; }
  const int* own_id_map() const { return own_ids() ? id_map_ : nullptr; }
  // The nodes of the largest tree of this depth.
  virtual int most_nodes(int depth) const;
  // The term added to the scores below a node that is not on the likeliest path.
  virtual float off_path() const { return 0; }

  const ModelSpec& model() const { return *spec_.model; }  // the draft's own layers

  const DrafterSpec spec_;
  const ModelSpec& target_;
  const int topk_;                    // K: candidates of a position
  const int num_rows_;                // number of rows of a block
  const DraftShape largest_;          // the largest depth D and tree size N
  const std::vector<int> vocab_ids_;  // draft id -> target id; empty: the ids are equal
  DraftLimits limits_;
  HeadParts parts_;

 private:
  static constexpr int kRepaired = 16;  // num_recent is at least this number

  // A convolution before and one after an attention or MLP. One projection gives both weights.
  struct Conv {
    std::string name;
    LinearMethod* projection;  // [2 width H / group, H]: gives the deltas of both convolutions
    MemoryPlan::Id base_id = 0;
    Tensor base{};  // [2 width, H]: the constant part of both convolutions' weights
  };
  struct Layer {
    HeadParts::Layer blocks;
    RmsNorm *attention_norm, *mlp_norm;
    Conv attention_conv{}, mlp_conv{};
    bool causal = false;
  };
  // Layers that follow one another and have the same masks.
  struct Segment {
    bool causal;
    Pass pass{};
  };

  bool has_conv() const { return conv_width_ > 0; }
  Layer make_layer(int index);
  Conv make_conv(const std::string& name);
  void layout(Carver& carver);
  void check_options(const std::string& kind, const std::vector<std::string>& own) const;
  int64_t num_inputs() const {  // number of fc's input columns
    return static_cast<int64_t>(target_layers_.size()) * target_.hidden_size;
  }
  // Columns of `delta_` that one side of a convolution reads.
  int delta_columns() const { return conv_width_ * model().hidden_size / conv_group_; }
  void append_segments();
  void append(const Layer& layer, OpList& ops) const;
  void append_block(const Conv& conv, const Block& block, const RmsNorm& norm, OpList& ops) const;
  void append_conv(const Conv& conv, int side, const Value& out, const Value& x, OpList& ops) const;
  // Stores the keys and values of the step's tokens from their hidden states x [T, m H].
  void store_context(const Context& ctx, const Step& step, const Tensor& x);
  // Stores the context rows of the last tokens.
  void process_accepted(const Context& ctx, const DraftBatch& batch);
  // Runs the block. Returns the hidden states [B D, H] that predict, after the final norm.
  Tensor run_block(const Context& ctx, const DraftBatch& batch);

  const std::vector<int> target_layers_, causal_layers_;
  const int predicts_from_, mask_id_, conv_width_, conv_group_;
  const bool has_mask_embedding_;
  LinearMethod* fc_;
  RmsNorm *context_norm_, *final_norm_;
  std::vector<Layer> layers_;
  Pass context_pass_;
  std::vector<Segment> segments_;

  ModelState* state_ = nullptr;
  MemoryPlan::Id buffer_id_ = 0, map_id_ = 0, gathered_id_ = 0, mask_embedding_id_ = 0,
                 predicted_id_ = 0, delta_id_ = 0, mixed_id_ = 0, branch_id_ = 0;
  // Arrays for max_seqs sequences.
  BlockRowsParams rows_;
  MtpRows context_rows_;       // the context rows of the last tokens
  int* predicting_ = nullptr;  // [max_seqs, D]: numbers of the block's rows whose logits count
  int* zeros_ = nullptr;       // [max_seqs * (R - 1)]: zeros, as ids and as an index
  int* candidate_ids_ = nullptr;
  float* logprobs_ = nullptr;
  Draft draft_;
  int* id_map_ = nullptr;  // [draft vocabulary] draft id -> target id; null: the ids are equal
  int64_t num_gathered_ = 0, num_block_rows_ = 0;
  Tensor gathered_;        // [max_seqs * max_path, m H]: hidden states of the accepted tokens
  Tensor mask_embedding_;  // [1, H]: embedding of the mask token
  Tensor predicted_;       // [max_seqs D, H]: hidden states of the rows whose logits count
  // Buffers of the convolutions: [T, 2 width H / group], [T, H], [T, H].
  Tensor delta_, mixed_, branch_;
};

// Two codebooks that score pairs of candidates, and the arrays of the scores (pair_scores).
class Codebooks {
 public:
  // Names of the tensors [V, r] and [draft vocabulary or V, r].
  Codebooks(std::string predecessor, std::string successor, int rank, int64_t num_successors)
      : names_{std::move(predecessor), std::move(successor)},
        rank_(rank),
        num_successors_(num_successors) {}

  // `candidates`: B D, `topk`: K.
  void plan(MemoryPlan& plan, const ModelSpec& target, DType dtype, int64_t candidates, int topk);
  void bind(const Arena& arena);
  void list_tensors(WeightTable& table) const;
  int rank() const { return rank_; }
  const Tensor& predecessors() const { return books_[0]; }  // [V, r]
  const Tensor& successors() const { return books_[1]; }    // [draft vocabulary or V, r]
  // The lattice of pair_scores. The codebooks and the results of `params` are set here.
  Lattice score(const Context& ctx, PairScoresParams params) const;

 private:
  const std::string names_[2];
  const int rank_;
  int64_t num_predecessors_ = 0;
  const int64_t num_successors_;
  DType dtype_ = DType::kBF16;
  MemoryPlan::Id ids_[2] = {}, tokens_id_ = 0, pairs_id_ = 0;
  Tensor books_[2];
  int* tokens_ = nullptr;
  float* pairs_ = nullptr;
};

}  // namespace cpmcu
