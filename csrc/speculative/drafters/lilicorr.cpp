// LiLiCorr heads: "lilicorr". A small transformer reads all candidates of a DFlash block, with or
// without DFlash2's convolutions, and scores pairs of neighbouring candidates
// (kernels/tree/lilicorr.h):
//
//   x        token_proj E[c] + pass_hidden_proj h + features of the log-probability + slot + rank
//   layers   pre-norm, attention among all candidates with a bias for each distance, silu MLP
//   anchor   a = norm(context_proj c), c: the context row of the last cached token
//   factors  f = silu(factor_input_proj [x; a; x a]), out = unit(out_head f), in = unit(in_head f)
//   pairs    log-softmax of logit_scale * out of the parent . in of the candidate
//
// E is the target's embedding table. The candidates' own log-probabilities are only features: no
// pair score adds them. Source: LiLiCorr, arXiv:2608.20530.
#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/add_bias.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/tree/lilicorr.h"
#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

class LiLiCorrDrafter : public BlockDrafter {
 public:
  // Options beside those of all block drafters:
  //
  //   option                    meaning
  //   head_size                 N, width of the transformer
  //   head_layers, head_heads   its layers, and attention heads of a layer
  //   head_inner                hidden values of its MLPs
  //   num_factors               F
  //   vector_eps, factor_scale  as eps and scale of factor_pairs
  LiLiCorrDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "LiLiCorr",
                     {"head_size", "head_layers", "head_heads", "head_inner", "num_factors",
                      "vector_eps", "factor_scale"}),
        size_(spec.options.integer("head_size", 0)),
        inner_(spec.options.integer("head_inner", 0)),
        num_heads_(spec.options.integer("head_heads", 1)),
        num_factors_(spec.options.integer("num_factors", 0)),
        vector_eps_(spec.options.number("vector_eps", 0)),
        factor_scale_(spec.options.number("factor_scale", 1)),
        layers_(static_cast<size_t>(spec.options.integer("head_layers", 1))) {
    CHECK(topk_ <= kMaxLatticeTopk, "the draft has {} candidates a position, expected at most {}",
          topk_, kMaxLatticeTopk);
    CHECK(num_heads_ >= 1 && size_ >= 8 && size_ % (8 * num_heads_) == 0 &&
              size_ / num_heads_ <= kMaxLatticeHeadDim,
          "the draft's transformer has {} heads and {} values, expected heads of a multiple of 8 "
          "values, at most {}",
          num_heads_, size_, kMaxLatticeHeadDim);
    CHECK(inner_ >= 8 && inner_ % 8 == 0 && num_factors_ >= 8 && num_factors_ % 8 == 0,
          "the draft has MLPs of {} values and {} factors, expected multiples of 8", inner_,
          num_factors_);
    list_weights();
  }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BlockDrafter::plan(plan, states, limits);
    const int64_t element = size_of(model().dtype), seqs = limits.max_seqs;
    const LatticeSize most = size(limits.max_seqs);
    const auto scratch = [&](const char* name, int64_t bytes) {
      return plan.add_scratch(spec_.scope + "lilicorr." + name, bytes, kSample, kSample);
    };
    for (Weight& weight : weights_) {
      weight.id =
          plan.add(name_of_tensor(weight.parts.front()), "weights", weight.elements() * element);
    }
    context_id_ =
        plan.add(spec_.scope + "lilicorr.context", "state", seqs * parts_.width() * element);
    if (projects_tokens()) {
      embedded_id_ = scratch("embedded", most.rows() * parts_.width() * element);
    }
    x_id_ = scratch("x", most.rows() * size_ * element);
    normed_id_ = scratch("normed", most.rows() * size_ * element);
    wide_id_ = scratch("wide", most.rows() * wide() * element);
    passed_id_ = scratch("passed", most.positions() * size_ * element);
    anchors_id_ = scratch("anchors", 2 * seqs * size_ * element);
    factors_id_ = scratch("factors", 4 * most.rows() * 2 * num_factors_);
    anchor_factors_id_ = scratch("anchor_factors", 4 * seqs * num_factors_);
    pairs_id_ = scratch("pairs", 4 * most.rows() * topk_);
  }

  void bind(const Arena& arena) override {
    BlockDrafter::bind(arena);
    const DType dtype = model().dtype;
    const int64_t seqs = limits_.max_seqs;
    const LatticeSize most = size(limits_.max_seqs);
    for (const Weight& weight : weights_) {
      const int64_t rows = weight.rows * std::ssize(weight.parts);
      *weight.tensor = weight.columns == 0 ? arena.tensor(weight.id, dtype, {rows})
                                           : arena.tensor(weight.id, dtype, {rows, weight.columns});
    }
    context_ = arena.tensor(context_id_, dtype, {seqs, parts_.width()});
    if (projects_tokens()) {
      embedded_ = arena.tensor(embedded_id_, dtype, {most.rows(), parts_.width()});
    }
    x_ = arena.tensor(x_id_, dtype, {most.rows(), size_});
    normed_ = arena.tensor(normed_id_, dtype, {most.rows(), size_});
    wide_ = arena.tensor(wide_id_, dtype, {most.rows() * wide()});
    passed_ = arena.tensor(passed_id_, dtype, {most.positions(), size_});
    anchors_ = arena.tensor(anchors_id_, dtype, {2 * seqs, size_});
    factors_ = arena.tensor(factors_id_, DType::kF32, {most.rows(), 2 * num_factors_});
    anchor_factors_ = arena.tensor(anchor_factors_id_, DType::kF32, {seqs, num_factors_});
    pairs_ = arena.array<float>(pairs_id_);
  }

  void list_tensors(WeightTable& table) override {
    BlockDrafter::list_tensors(table);
    for (const Weight& weight : weights_) {
      int64_t first = 0;
      for (const std::string& part : weight.parts) {
        table.add(name_of_tensor(part), weight.tensor->rows(first, weight.rows));
        first += weight.rows;
      }
    }
  }

 protected:
  void keep_context(const Context& ctx, const Tensor& rows, const int* last_rows,
                    int num_seqs) override {
    gather_rows(ctx, {.out = context_.rows(0, num_seqs), .x = rows, .index = last_rows});
  }

  Lattice score(const Context& ctx, const DraftBatch&, const Candidates& candidates) override {
    const LatticeSize size = this->size(candidates.num_seqs);
    embed(ctx, candidates, size);
    for (const Layer& layer : layers_) run_layer(ctx, layer, size);
    score_pairs(ctx, candidates, size);
    return {.num_seqs = candidates.num_seqs,
            .depth = candidates.depth,
            .topk = candidates.topk,
            .tokens = candidates.ids,
            .pairs = pairs_};
  }

 private:
  // Tensors of the checkpoint that are stacked by rows in one engine tensor. If `columns` is 0,
  // they are vectors.
  struct Weight {
    std::vector<std::string> parts;  // names of the parts, without "lilicorr."
    int64_t rows = 0;                // number of rows of each part
    int64_t columns = 0;
    Tensor* tensor;
    MemoryPlan::Id id = 0;
    int64_t elements() const { return std::ssize(parts) * rows * std::max<int64_t>(columns, 1); }
  };
  struct Layer {
    Tensor attention_norm, qkv, qkv_bias, out, out_bias;
    Tensor mlp_norm, up, up_bias, down, down_bias;
  };

  bool projects_tokens() const { return size_ != parts_.width(); }
  std::string name_of_tensor(const std::string& part) const {
    return spec_.scope + "lilicorr." + part;
  }
  LatticeSize size(int num_seqs) const {
    return {.num_seqs = num_seqs, .depth = largest_.depth, .topk = topk_};
  }
  int64_t wide() const { return std::max(3 * size_, inner_); }
  // The first `columns` values for each of R rows of `wide_`.
  Tensor wide(int64_t num_rows, int64_t columns) const {
    return wide_.rows(0, num_rows * columns).view({num_rows, columns});
  }

  void add(Tensor& tensor, std::vector<std::string> parts, int64_t rows, int64_t columns = 0) {
    weights_.push_back(
        {.parts = std::move(parts), .rows = rows, .columns = columns, .tensor = &tensor});
  }
  void list_weights() {
    const int64_t width = parts_.width(), slots = num_rows_ - 1;
    std::vector<std::string> biases{"pass_hidden_proj.bias", "feature_mlp.down_proj.bias"};
    if (projects_tokens()) {
      add(token_proj_, {"token_proj.weight"}, size_, width);
      biases.emplace_back("token_proj.bias");
    }
    add(state_biases_, biases, size_);
    add(pass_proj_, {"pass_hidden_proj.weight"}, size_, width);
    add(context_proj_, {"context_proj.weight"}, size_, width);
    add(context_bias_, {"context_proj.bias"}, size_);
    add(feature_norm_, {"feature_norm.weight"}, kCandidateFeatures);
    add(feature_norm_bias_, {"feature_norm.bias"}, kCandidateFeatures);
    add(feature_up_, {"feature_mlp.up_proj.weight"}, size_, kCandidateFeatures);
    add(feature_up_bias_, {"feature_mlp.up_proj.bias"}, size_);
    add(feature_down_, {"feature_mlp.down_proj.weight"}, size_, size_);
    add(slots_, {"slot_embedding"}, slots, size_);
    add(ranks_, {"rank_embedding"}, topk_, size_);
    add(slot_bias_, {"relative_slot_bias"}, num_heads_, 2 * slots + 1);
    add(same_bias_, {"same_slot_bias"}, num_heads_);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      Layer& layer = layers_[i];
      add(layer.attention_norm, {prefix + "attn_norm.weight"}, size_);
      add(layer.qkv, {prefix + "attn.in_proj_weight"}, 3 * size_, size_);
      add(layer.qkv_bias, {prefix + "attn.in_proj_bias"}, 3 * size_);
      add(layer.out, {prefix + "attn.out_proj.weight"}, size_, size_);
      add(layer.out_bias, {prefix + "attn.out_proj.bias"}, size_);
      add(layer.mlp_norm, {prefix + "mlp_norm.weight"}, size_);
      add(layer.up, {prefix + "mlp.up_proj.weight"}, inner_, size_);
      add(layer.up_bias, {prefix + "mlp.up_proj.bias"}, inner_);
      add(layer.down, {prefix + "mlp.down_proj.weight"}, size_, inner_);
      add(layer.down_bias, {prefix + "mlp.down_proj.bias"}, size_);
    }
    add(output_norm_, {"output_norm.weight"}, size_);
    add(anchor_norm_, {"anchor_norm.weight"}, size_);
    add(factor_proj_, {"factor_input_proj.weight"}, size_, 3 * size_);
    add(factor_bias_, {"factor_input_proj.bias"}, size_);
    add(edges_, {"out_head.weight", "in_head.weight"}, num_factors_, size_);
    add(edges_bias_, {"out_head.bias", "in_head.bias"}, num_factors_);
    add(anchor_out_, {"anchor_out_head.weight"}, num_factors_, size_);
    add(anchor_out_bias_, {"anchor_out_head.bias"}, num_factors_);
  }

  void norm(const Context& ctx, const Tensor& out, const Tensor& x, const Tensor& weight) const {
    rms_norm(ctx, {.out = out, .x = x, .weight = weight, .eps = model().rms_norm_eps});
  }
  // y = x W^T + bias + beta y.
  static void linear(const Context& ctx, const Tensor& y, const Tensor& x, const Tensor& w,
                     const Tensor& bias, float beta = 0) {
    skinny_gemm(ctx, {.y = y, .x = x, .w = w, .beta = beta});
    add_bias(ctx, {.y = y, .bias = bias.view({1, bias.size(0)})});
  }

  // x of all candidates.
  void embed(const Context& ctx, const Candidates& candidates, const LatticeSize& size) const {
    const Tensor x = x_.rows(0, size.rows()), features = wide(size.rows(), size_);
    const Tensor embedded = projects_tokens() ? embedded_.rows(0, size.rows()) : x;
    embedding(ctx, {.out = embedded, .table = parts_.embedding_table(), .ids = candidates.ids});
    if (projects_tokens()) skinny_gemm(ctx, {.y = x, .x = embedded, .w = token_proj_});
    candidate_features(ctx, {.size = size,
                             .logprobs = candidates.logprobs,
                             .norm_weight = feature_norm_,
                             .norm_bias = feature_norm_bias_,
                             .weight = feature_up_,
                             .bias = feature_up_bias_,
                             .out = features});
    skinny_gemm(ctx, {.y = x, .x = features, .w = feature_down_, .beta = 1});
    const Tensor passed = passed_.rows(0, size.positions());
    skinny_gemm(ctx, {.y = passed, .x = candidates.hidden, .w = pass_proj_});
    candidate_states(ctx, {.size = size,
                           .x = x,
                           .hidden = passed,
                           .slots = slots_,
                           .ranks = ranks_,
                           .biases = state_biases_.view({state_biases_.size(0) / size_, size_})});
  }

  void run_layer(const Context& ctx, const Layer& layer, const LatticeSize& size) const {
    const Tensor x = x_.rows(0, size.rows()), normed = normed_.rows(0, size.rows());
    const Tensor qkv = wide(size.rows(), 3 * size_), inner = wide(size.rows(), inner_);
    norm(ctx, normed, x, layer.attention_norm);
    linear(ctx, qkv, normed, layer.qkv, layer.qkv_bias);
    lattice_attention(ctx, {.size = size,
                            .num_heads = num_heads_,
                            .qkv = qkv,
                            .slot_bias = slot_bias_,
                            .same_bias = same_bias_,
                            .out = normed});
    linear(ctx, x, normed, layer.out, layer.out_bias, 1);
    norm(ctx, normed, x, layer.mlp_norm);
    skinny_gemm(ctx, {.y = inner, .x = normed, .w = layer.up});
    bias_silu(ctx, {.y = inner, .bias = layer.up_bias});
    linear(ctx, x, inner, layer.down, layer.down_bias, 1);
  }

  void score_pairs(const Context& ctx, const Candidates& candidates, const LatticeSize& size) {
    const Tensor x = x_.rows(0, size.rows()), normed = normed_.rows(0, size.rows());
    const Tensor inputs = wide(size.rows(), 3 * size_), factors = factors_.rows(0, size.rows());
    const Tensor projected = anchors_.rows(0, size.num_seqs);
    const Tensor anchors = anchors_.rows(limits_.max_seqs, size.num_seqs);
    const Tensor of_anchors = anchor_factors_.rows(0, size.num_seqs);
    linear(ctx, projected, context_.rows(0, size.num_seqs), context_proj_, context_bias_);
    norm(ctx, anchors, projected, anchor_norm_);
    norm(ctx, normed, x, output_norm_);
    factor_inputs(ctx, {.size = size, .x = normed, .anchors = anchors, .out = inputs});
    skinny_gemm(ctx, {.y = x, .x = inputs, .w = factor_proj_});
    bias_silu(ctx, {.y = x, .bias = factor_bias_});
    linear(ctx, factors, x, edges_, edges_bias_);
    linear(ctx, of_anchors, anchors, anchor_out_, anchor_out_bias_);
    factor_pairs(ctx, {.size = size,
                       .candidates = candidates.ids,
                       .factors = factors,
                       .anchors = of_anchors,
                       .eps = vector_eps_,
                       .scale = factor_scale_,
                       .pairs = pairs_});
  }

  const int64_t size_, inner_;
  const int num_heads_;
  const int64_t num_factors_;
  const float vector_eps_, factor_scale_;
  std::vector<Layer> layers_;
  std::vector<Weight> weights_;  // all tensors of the head

  Tensor token_proj_, pass_proj_, context_proj_, context_bias_;
  Tensor feature_norm_, feature_norm_bias_, feature_up_, feature_up_bias_, feature_down_;
  Tensor state_biases_, slots_, ranks_, slot_bias_, same_bias_;
  Tensor output_norm_, anchor_norm_, factor_proj_, factor_bias_;
  Tensor edges_, edges_bias_, anchor_out_, anchor_out_bias_;

  MemoryPlan::Id context_id_ = 0, embedded_id_ = 0, x_id_ = 0, normed_id_ = 0, wide_id_ = 0,
                 passed_id_ = 0, anchors_id_ = 0, factors_id_ = 0, anchor_factors_id_ = 0,
                 pairs_id_ = 0;
  Tensor context_;         // [max_seqs, H]: the context row of each sequence's last cached token
  Tensor embedded_;        // [R, H]: embeddings of all candidates
  Tensor x_, normed_;      // [R, N] each
  Tensor wide_;            // [R max(3 N, inner)]: features, qkv, MLP, inputs of the factors
  Tensor passed_;          // [max_seqs D, N]
  Tensor anchors_;         // [2 max_seqs, N]: anchors before the norm, then after it
  Tensor factors_;         // [R, 2 F] float32
  Tensor anchor_factors_;  // [max_seqs, F] float32
  float* pairs_ = nullptr;
};

REGISTER_DRAFTER("lilicorr", LiLiCorrDrafter);

}  // namespace
}  // namespace cpmcu
