#include "model/transformer.h"

#include "kernels/embedding.h"
#include "kernels/gemm/gemm.h"

namespace cpmcu {

Transformer::Transformer(const ModelSpec& spec) : spec_(spec), final_norm_(spec, "model.norm") {
  for (int layer = 0; layer < spec.num_hidden_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    Timeline phase = kMixer;
    for (const std::string& kind : spec.blocks_of(layer)) {
      const BlockConfig config{.spec = spec, .prefix = prefix, .layer = layer, .phase = phase};
      std::unique_ptr<Block> block = BlockRegistry::instance().create("block", kind, config);
      RmsNorm norm(spec, block->norm_name());
      sublayers_.push_back({std::move(norm), std::move(block)});
      phase = kMlp;
    }
  }
  if (!spec.tie_word_embeddings) {
    head_ = make_linear(spec.linear_method_of("lm_head"), {.parts = {{"lm_head", spec.vocab_size}},
                                                           .in_features = spec.hidden_size,
                                                           .dtype = spec.dtype,
                                                           .options = spec.linear_options});
  }
}

void Transformer::plan(MemoryPlan& plan, const StepLimits& limits, int max_logit_rows) {
  const int64_t row_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);
  max_rows_ = limits.max_rows;
  max_logit_rows_ = max_logit_rows;
  embed_id_ = plan.add("model.embed_tokens", "weights", spec_.vocab_size * row_bytes);
  for (Sublayer& sublayer : sublayers_) {
    sublayer.norm.plan(plan);
    sublayer.block->plan(plan, limits);
  }
  final_norm_.plan(plan);
  if (head_) head_->plan(plan, limits);
  hidden_id_ = plan.add_scratch("hidden", max_rows_ * row_bytes, kEmbed, kHead);
  normed_id_ = plan.add_scratch("normed", max_rows_ * row_bytes, kMixer, kMlp + 1);
  head_in_id_ = plan.add_scratch("head_in", max_logit_rows_ * row_bytes, kFinalNorm, kHead);
  logits_id_ =
      plan.add_scratch("logits", int64_t{4} * max_logit_rows_ * spec_.vocab_size, kHead, kSample);
}

void Transformer::bind(const Arena& arena) {
  const int64_t hidden = spec_.hidden_size;
  embed_ = arena.tensor(embed_id_, spec_.dtype, {spec_.vocab_size, hidden});
  for (Sublayer& sublayer : sublayers_) {
    sublayer.norm.bind(arena);
    sublayer.block->bind(arena);
  }
  final_norm_.bind(arena);
  if (head_) head_->bind(arena);
  hidden_ = arena.tensor(hidden_id_, spec_.dtype, {max_rows_, hidden});
  normed_ = arena.tensor(normed_id_, spec_.dtype, {max_rows_, hidden});
  head_in_ = arena.tensor(head_in_id_, spec_.dtype, {max_logit_rows_, hidden});
  logits_ = arena.tensor(logits_id_, DType::kF32, {max_logit_rows_, spec_.vocab_size});
}

void Transformer::list_tensors(WeightTable& table) {
  table.add("model.embed_tokens.weight", embed_);
  for (Sublayer& sublayer : sublayers_) {
    sublayer.norm.list_tensors(table);
    sublayer.block->list_tensors(table);
  }
  final_norm_.list_tensors(table);
  if (head_) head_->list_tensors(table);
}

void Transformer::finish_loading(const Context& ctx) {
  for (Sublayer& sublayer : sublayers_) sublayer.block->finish_loading(ctx);
  if (head_) head_->finish_loading(ctx);
}

Tensor Transformer::forward(const Context& ctx, const Step& step, const KvCache& cache) const {
  const Tensor hidden = hidden_.rows(0, step.rows.num_rows);
  const Tensor normed = normed_.rows(0, step.rows.num_rows);
  embedding(ctx, {.out = hidden, .table = embed_, .ids = step.ids, .scale = spec_.embed_scale});
  for (const Sublayer& sublayer : sublayers_) {
    sublayer.norm.forward(ctx, normed, hidden);
    sublayer.block->forward(ctx, step, hidden, normed, cache);
  }
  return hidden;
}

Tensor Transformer::head(const Context& ctx, const Tensor& rows) const {
  const Tensor normed = head_in_.rows(0, rows.size(0));
  const Tensor logits = logits_.rows(0, rows.size(0));
  final_norm_.forward(ctx, normed, rows);
  // The head counts as decoding in every phase: a row's logits never depend on the other rows.
  if (head_) {
    head_->forward(ctx, Phase::kDecode, logits, normed, spec_.logit_scale, 0);
  } else {
    skinny_gemm(ctx, {.y = logits, .x = normed, .w = embed_, .alpha = spec_.logit_scale});
  }
  return logits;
}

}  // namespace cpmcu
