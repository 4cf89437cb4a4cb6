#include "model/transformer.h"

#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/layer/norm_heads.h"
#include "kernels/layer/softcap.h"
#include "kernels/ranks/rank_gather.h"

namespace cpmcu {

Transformer::Transformer(const ModelSpec& spec, std::string prefix, int window)
    : spec_(spec),
      prefix_(std::move(prefix)),
      final_norm_(spec, prefix_ + "model.norm", 0, spec.plain_final_norm) {
  for (int layer = 0; layer < spec.num_hidden_layers; ++layer) {
    const std::string name = prefix_ + "model.layers." + std::to_string(layer) + ".";
    Timeline phase = kMixer;
    for (BlockSpec& each : spec.layer(layer)) {
      if (window > 0 && each.kind == "attention" && !each.params.values().contains("window")) {
        each.params.set("window", int64_t{window});
      }
      sublayers_.emplace_back(layer, each.kind,
                              BlockConfig{.spec = spec,
                                          .params = each.params,
                                          .prefix = name,
                                          .scope = prefix_,
                                          .phase = phase});
      has_branch_ |= sublayers_.back().norms_output();
      phase = kMlp;
    }
  }
  const std::string head = prefix_ + "lm_head";
  // A tied head has its own linear method only if it is a quantised copy of the table.
  if (!spec.tie_word_embeddings || spec.quantises(head)) {
    head_ = make_linear(spec.linear_method_of(head), {.parts = {{head, spec.vocab_size}},
                                                      .in_features = spec.hidden_size,
                                                      .dtype = spec.dtype,
                                                      .options = spec.linear_options_of(head),
                                                      .has_tensors = !spec.tie_word_embeddings});
  }
}

void Transformer::plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits,
                       int max_head_rows, int max_logit_rows) {
  const int64_t row_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);
  max_tokens_ = limits.max_tokens;
  max_head_rows_ = max_head_rows;
  max_logit_rows_ = max_logit_rows;
  embed_id_ = plan.add(prefix_ + "model.embed_tokens", "weights", spec_.vocab_size * row_bytes);
  for (Sublayer& sublayer : sublayers_) sublayer.plan(plan, state, limits);
  final_norm_.plan(plan);
  if (head_) head_->plan(plan, limits);
  hidden_id_ = plan.add_scratch("hidden", max_tokens_ * row_bytes, kEmbed, kHead);
  normed_id_ = plan.add_scratch("normed", max_tokens_ * row_bytes, kMixer, kMlp + 1);
  branch_id_ =
      plan.add_scratch("branch", has_branch_ ? max_tokens_ * row_bytes : 0, kMixer, kMlp + 3);
  if (spec_.num_ranks > 1) {
    part_id_ = plan.add_scratch("part", max_tokens_ * row_bytes, kMixer, kMlp + 3);
  }
  if (divides_head()) {
    part_logits_id_ = plan.add_scratch(
        "part_logits", int64_t{4} * max_logit_rows_ * spec_.vocab_size / spec_.num_ranks, 0,
        kSample);
  }
  aux_hidden_id_ = plan.add_scratch(
      prefix_ + "aux_hidden",
      max_tokens_ * row_bytes * static_cast<int64_t>(aux_hidden_layers_.size()), 0, kSample);
  head_in_id_ = plan.add_scratch("head_in", max_head_rows_ * row_bytes, kFinalNorm, kSample);
  logits_id_ =
      plan.add_scratch("logits", int64_t{4} * max_logit_rows_ * spec_.vocab_size, kHead, kSample);
}

void Transformer::bind(const Arena& arena, const ModelState& state) {
  const int64_t hidden = spec_.hidden_size;
  embed_ = arena.tensor(embed_id_, spec_.dtype, {spec_.vocab_size, hidden});
  for (Sublayer& sublayer : sublayers_) sublayer.bind(arena, state);
  final_norm_.bind(arena);
  if (head_) head_->bind(arena);
  hidden_ = arena.tensor(hidden_id_, spec_.dtype, {max_tokens_, hidden});
  normed_ = arena.tensor(normed_id_, spec_.dtype, {max_tokens_, hidden});
  if (has_branch_) branch_ = arena.tensor(branch_id_, spec_.dtype, {max_tokens_, hidden});
  if (spec_.num_ranks > 1) part_ = arena.tensor(part_id_, spec_.dtype, {max_tokens_, hidden});
  if (divides_head()) {
    part_logits_ = arena.tensor(part_logits_id_, DType::kF32,
                                {max_logit_rows_, spec_.vocab_size / spec_.num_ranks});
  }
  aux_hidden_ =
      arena.tensor(aux_hidden_id_, spec_.dtype,
                   {max_tokens_, static_cast<int64_t>(aux_hidden_layers_.size()) * hidden});
  head_in_ = arena.tensor(head_in_id_, spec_.dtype, {max_head_rows_, hidden});
  logits_ = arena.tensor(logits_id_, DType::kF32, {max_logit_rows_, spec_.vocab_size});
  pass_.append([this](OpList& ops) { append(ops); });
  for (const Sublayer& sublayer : sublayers_) sublayer.block().append_commit(commit_.ops());
}

void Transformer::list_tensors(WeightTable& table) {
  table.add(prefix_ + "model.embed_tokens.weight", embed_);
  for (Sublayer& sublayer : sublayers_) sublayer.list_tensors(table);
  final_norm_.list_tensors(table);
  if (head_ && !spec_.tie_word_embeddings) head_->list_tensors(table);
}

void Transformer::finish_loading(const Context& ctx) {
  pass_.cut(CutTarget::of(ctx));
  commit_.cut(CutTarget::of(ctx));
  for (Sublayer& sublayer : sublayers_) sublayer.block().finish_loading(ctx);
  if (head_ == nullptr) return;
  spec_.tie_word_embeddings ? head_->load_rows(ctx, embed_, nullptr) : head_->finish_loading(ctx);
}

void Transformer::append(OpList& ops) const {
  const Value hidden = ops.value("hidden", hidden_), normed = ops.value("normed", normed_);
  const Value branch = has_branch_ ? ops.value("branch", branch_) : Value();
  if (spec_.num_ranks > 1) ops.sum_over_ranks(ops.value("part", part_));
  ops.call(
      prefix_ + "model.embed_tokens", {}, {hidden},
      [=, this](const Context& ctx, const Step& step, const Rows& rows) {
        embedding(
            ctx,
            {.out = rows(hidden), .table = embed_, .ids = step.ids, .scale = spec_.embed_scale});
      });
  if (spec_.normed_embedding) {
    ops.call(prefix_ + "model.embedding_norm", {hidden}, {hidden},
             [=, this](const Context& ctx, const Step&, const Rows& rows) {
               norm_heads(
                   ctx, {.x = rows(hidden), .width = spec_.hidden_size, .eps = spec_.rms_norm_eps});
             });
  }
  int layer = -1;
  for (const Sublayer& sublayer : sublayers_) {
    if (sublayer.layer() != layer) {
      layer = sublayer.layer();
      ops.begin_layer(layer, prefix_ + "model.layers." + std::to_string(layer) + ".");
      ops.layer_input(hidden, copy_aux_hidden(layer, hidden));
    }
    sublayer.append(ops, hidden, normed, branch);
  }
}

RunOp Transformer::copy_aux_hidden(int layer, const Value& hidden) const {
  std::vector<size_t> places;  // places of this layer's input among the auxiliary hidden states
  for (size_t i = 0; i < aux_hidden_layers_.size(); ++i) {
    if (aux_hidden_layers_[i] == layer) places.push_back(i);
  }
  if (places.empty()) return {};
  return [=, this](const Context& ctx, const Step&, const Rows& rows) {
    for (const size_t i : places) {
      const int64_t first = static_cast<int64_t>(i) * spec_.hidden_size * size_of(spec_.dtype);
      const Tensor columns(aux_hidden_.as<char>() + first, spec_.dtype,
                           {rows.count, spec_.hidden_size});
      gather_rows(ctx, {.out = columns, .x = rows(hidden), .out_stride = aux_hidden_.size(1)});
    }
  };
}

Tensor Transformer::head(const Context& ctx, const Tensor& rows, int first_row) const {
  const Tensor normed = head_in_.rows(first_row, rows.size(0));
  const Tensor logits = logits_.rows(0, rows.size(0));
  final_norm_.forward(ctx, normed, rows);
  project(ctx, logits, normed, spec_.logit_scale);
  if (spec_.logit_softcap > 0) softcap(ctx, {.x = logits, .cap = spec_.logit_softcap});
  return logits;
}

// Each rank has all rows of a dense head, because a draft may use any of them. It multiplies only
// its own rows.
bool Transformer::divides_head() const {
  const bool is_dense = head_ == nullptr || spec_.linear_method_of(prefix_ + "lm_head") == "dense";
  return spec_.num_ranks > 1 && is_dense && spec_.vocab_size % (8 * spec_.num_ranks) == 0;
}

// The head uses the decode kernels in every phase: a row's logits never depend on the other rows.
void Transformer::project(const Context& ctx, const Tensor& logits, const Tensor& normed,
                          float scale) const {
  if (!part_logits_.empty()) {
    const Tensor weight = head_ ? head_->dense_weight() : embed_;
    const int64_t columns = part_logits_.size(1), num_rows = logits.size(0);
    const int64_t most = std::min(ctx.exchange->num_words / columns, part_logits_.size(0));
    const Tensor own = weight.rows(ctx.exchange->rank * columns, columns);
    for (int64_t row = 0; row < num_rows; row += most) {
      const int64_t count = std::min(most, num_rows - row);
      const Tensor part = part_logits_.rows(0, count);
      skinny_gemm(ctx, {.y = part, .x = normed.rows(row, count), .w = own, .alpha = scale});
      rank_gather(ctx, {.out = logits.rows(row, count), .part = part});
    }
  } else if (head_) {
    head_->forward(ctx, Phase::kDecode, logits, normed, scale, 0);
  } else {
    skinny_gemm(ctx, {.y = logits, .x = normed, .w = embed_, .alpha = scale});
  }
}

}  // namespace cpmcu
