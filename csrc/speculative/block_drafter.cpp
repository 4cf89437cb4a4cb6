#include "speculative/block_drafter.h"

#include <algorithm>

#include "kernels/layer/block_conv.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/layer/softcap.h"

namespace cpmcu {

BlockDrafter::BlockDrafter(const DrafterSpec& spec, const ModelSpec& target,
                           const std::string& kind, const std::vector<std::string>& own)
    : spec_(spec),
      target_(target),
      topk_(spec.options.integer("topk", 16)),
      num_rows_(spec.options.integer("block_size", 16)),
      largest_(spec.shape),
      vocab_ids_(spec.options.integers("vocab_ids")),
      parts_(spec_, vocab_ids_, target, kind),
      target_layers_(spec.options.integers("target_layers")),
      causal_layers_(spec.options.integers("causal_layers")),
      predicts_from_(spec.options.integer("predicts_from", 1)),
      mask_id_(spec.options.integer("mask_id", 0)),
      conv_width_(spec.options.integer("conv_width", 0)),
      conv_group_(spec.options.integer("conv_group", 16)),
      has_mask_embedding_(spec.options.flag("mask_embedding", false)) {
  check_options(kind, own);
  const std::string& scope = spec_.scope;
  fc_ = parts_.add_linear(scope + "fc", num_inputs());
  context_norm_ = parts_.add_norm(scope + "hidden_norm");
  for (int i = 0; i < model().num_hidden_layers; ++i) layers_.push_back(make_layer(i));
  final_norm_ = parts_.add_norm(scope + "norm");
}

void BlockDrafter::check_options(const std::string& kind,
                                 const std::vector<std::string>& own) const {
  Params common;
  for (const auto& [name, value] : spec_.options.values()) {
    if (std::ranges::find(own, name) == own.end()) common.set(name, value);
  }
  common.check_known("a " + kind + " draft", {"target_layers", "block_size", "predicts_from",
                                              "mask_id", "mask_embedding", "causal_layers", "topk",
                                              "vocab_ids", "own_head", "conv_width", "conv_group"});
  CHECK(topk_ >= 1 && topk_ <= kMaxTopk, "the draft has {} candidates a position, expected 1 to {}",
        topk_, kMaxTopk);
  CHECK(num_rows_ >= 2 && num_rows_ <= kMaxDraftDepth + 1,
        "the draft's block has {} rows, expected 2 to {}", num_rows_, kMaxDraftDepth + 1);
  CHECK(predicts_from_ == 0 || predicts_from_ == 1,
        "the draft predicts from row {}, expected 0 or 1", predicts_from_);
  const int positions = num_rows_ - predicts_from_;
  CHECK(largest_.depth <= positions,
        "the draft depth is {}, expected at most {}, the tokens that a block predicts",
        largest_.depth, positions);
  CHECK(!target_layers_.empty(), "the draft has no target_layers, expected at least one layer");
  for (int layer : target_layers_) {
    CHECK(layer >= 0 && layer < target_.num_hidden_layers,
          "the draft reads the input of target layer {}, expected 0 to {}", layer,
          target_.num_hidden_layers - 1);
  }
  CHECK(has_mask_embedding_ || (mask_id_ >= 0 && mask_id_ < target_.vocab_size),
        "the draft's mask token is {}, expected a token of the target, 0 to {}", mask_id_,
        target_.vocab_size - 1);
  CHECK(conv_width_ >= 0 && conv_width_ <= num_rows_ && conv_group_ >= 1 &&
            model().hidden_size % conv_group_ == 0,
        "the draft's convolution has {} weights a channel and groups of {}, expected at most {} "
        "weights and a divisor of hidden_size {}",
        conv_width_, conv_group_, num_rows_, model().hidden_size);
}

BlockDrafter::Layer BlockDrafter::make_layer(int index) {
  const std::string prefix = spec_.scope + "layers." + std::to_string(index) + ".";
  Layer layer{.blocks = parts_.add_layer(prefix, model().layer(index), 0, !has_conv()),
              .attention_norm = parts_.add_norm(prefix + "input_layernorm"),
              .mlp_norm = parts_.add_norm(prefix + "post_attention_layernorm"),
              .causal = std::ranges::find(causal_layers_, index) != causal_layers_.end()};
  if (has_conv()) {
    layer.attention_conv = make_conv(prefix + "attention_conv");
    layer.mlp_conv = make_conv(prefix + "mlp_conv");
  }
  return layer;
}

BlockDrafter::Conv BlockDrafter::make_conv(const std::string& name) {
  return {.name = name,
          .projection =
              parts_.add_linear(name + ".kernel_projection", parts_.width(), 2 * delta_columns())};
}

int BlockDrafter::most_nodes(int depth) const {
  int nodes = 1, level = 1;
  for (int i = 0; i < depth && nodes < kMaxTreeSize; ++i) {
    level = std::min(level * topk_, kMaxTreeSize);
    nodes = std::min(nodes + level, kMaxTreeSize);
  }
  return nodes;
}

DraftShape BlockDrafter::shrunk(const DraftShape& limit) const {
  const int depth = std::min(limit.depth, largest_.depth);
  if (depth < 1) return {};
  return {depth, std::min({limit.tree_size, largest_.tree_size, most_nodes(depth)})};
}

// ---- set-up

void BlockDrafter::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  limits_ = limits;
  state_ = &states.add_model(spec_.scope, /*has_gaps=*/true);
  const int most_rows = limits.max_seqs * std::max(limits.max_path, num_rows_);
  const StepLimits step{.max_tokens = std::max(limits.max_prompt_tokens, most_rows),
                        .max_decode_tokens = most_rows,
                        .max_kv = limits.max_kv,
                        .compute_capability = limits.compute_capability};
  const int num_predicted = limits.max_seqs * largest_.depth;
  parts_.plan(plan, *state_, step, num_predicted);
  const int64_t element = size_of(model().dtype), width = parts_.width();
  const std::string& scope = spec_.scope;
  buffer_id_ = plan.add(scope + "arrays", "state", carved_bytes([&](Carver& c) { layout(c); }));
  map_id_ = plan.add(scope + "id_map", "state", static_cast<int64_t>(4 * vocab_ids_.size()));
  num_gathered_ = int64_t{limits.max_seqs} * limits.max_path;
  gathered_id_ =
      plan.add_scratch(scope + "gathered", num_gathered_ * num_inputs() * element, 0, kMixer);
  predicted_id_ =
      plan.add_scratch(scope + "predicted", num_predicted * width * element, kFinalNorm, kSample);
  if (has_mask_embedding_) {
    mask_embedding_id_ = plan.add(scope + "mask_embedding", "weights", width * element);
  }
  if (!has_conv()) return;
  num_block_rows_ = limits.max_seqs * num_rows_;
  const auto scratch = [&](const char* name, int64_t columns) {
    return plan.add_scratch(scope + name, num_block_rows_ * columns * element, kMixer, kFinalNorm);
  };
  delta_id_ = scratch("conv_delta", 2 * delta_columns());
  mixed_id_ = scratch("conv_mixed", width);
  branch_id_ = scratch("conv_branch", width);
  for (Layer& layer : layers_) {
    for (Conv* conv : {&layer.attention_conv, &layer.mlp_conv}) {
      conv->base_id = plan.add(conv->name + ".base_kernel", "weights",
                               int64_t{2} * conv_width_ * width * element);
    }
  }
}

void BlockDrafter::layout(Carver& carver) {
  const int64_t b = limits_.max_seqs, path = limits_.max_path, candidates = b * largest_.depth;
  const auto ints = [&](int64_t count) { return carver.take<int>(count); };
  rows_ = {.num_rows = num_rows_,
           .mask_id = mask_id_,
           .ids = ints(b * num_rows_),
           .positions = ints(b * num_rows_),
           .token_seqs = ints(b * num_rows_),
           .seq_token_begin = ints(b + 1),
           .all_masks = carver.take<uint64_t>(b * num_rows_),
           .mask_rows = ints(b * (num_rows_ - 1))};
  context_rows_ = {.ids = ints(b * path),
                   .positions = ints(b * path),
                   .token_seqs = ints(b * path),
                   .hidden_rows = ints(b * path),
                   .ancestor_masks = carver.take<uint64_t>(b * path),
                   .seq_token_begin = ints(b + 1),
                   .last_rows = ints(b),
                   .lengths = ints(limits_.max_slots)};
  predicting_ = ints(candidates);
  zeros_ = ints(b * (num_rows_ - 1));
  candidate_ids_ = ints(candidates * topk_);
  logprobs_ = carver.take<float>(candidates * topk_);
  const int64_t tokens = b * (largest_.tree_size - 1);
  draft_ = {.tokens = ints(tokens), .parents = ints(tokens), .scores = carver.take<float>(tokens)};
}

void BlockDrafter::bind(const Arena& arena) {
  parts_.bind(arena, *state_);
  Carver carver(arena.array<char>(buffer_id_));
  layout(carver);
  const DType dtype = model().dtype;
  const int64_t width = parts_.width();
  if (!vocab_ids_.empty()) id_map_ = arena.array<int>(map_id_);
  gathered_ = arena.tensor(gathered_id_, dtype, {num_gathered_, num_inputs()});
  predicted_ =
      arena.tensor(predicted_id_, dtype, {int64_t{limits_.max_seqs} * largest_.depth, width});
  if (has_mask_embedding_) mask_embedding_ = arena.tensor(mask_embedding_id_, dtype, {1, width});
  if (has_conv()) {
    delta_ = arena.tensor(delta_id_, dtype, {num_block_rows_, 2 * delta_columns()});
    mixed_ = arena.tensor(mixed_id_, dtype, {num_block_rows_, width});
    branch_ = arena.tensor(branch_id_, dtype, {num_block_rows_, width});
    for (Layer& layer : layers_) {
      for (Conv* conv : {&layer.attention_conv, &layer.mlp_conv}) {
        conv->base = arena.tensor(conv->base_id, dtype, {int64_t{2} * conv_width_, width});
      }
    }
  }
  context_pass_.append([&](OpList& ops) {
    for (const Layer& layer : layers_) {
      layer.blocks.attention->append_keys(ops, parts_.normed_value(ops));
    }
  });
  append_segments();
}

void BlockDrafter::append_segments() {
  for (size_t first = 0; first < layers_.size();) {
    const bool causal = layers_[first].causal;
    size_t end = first;
    while (end < layers_.size() && layers_[end].causal == causal) ++end;
    segments_.push_back({.causal = causal});
    segments_.back().pass.append([&](OpList& ops) {
      for (size_t i = first; i < end; ++i) append(layers_[i], ops);
    });
    first = end;
  }
}

void BlockDrafter::list_tensors(WeightTable& table) {
  parts_.list_tensors(table);
  if (has_mask_embedding_) {
    table.add(spec_.scope + "mask_embedding", mask_embedding_.view({parts_.width()}));
  }
  if (!has_conv()) return;
  for (const Layer& layer : layers_) {
    for (const Conv* conv : {&layer.attention_conv, &layer.mlp_conv}) {
      table.add(conv->name + ".base_kernel", conv->base.view({2, conv_width_, parts_.width()}));
    }
  }
}

void BlockDrafter::finish_loading(const Context& ctx, const TargetParts& target) {
  parts_.finish_loading(ctx, target);
  context_pass_.cut(HeadParts::cut_target(ctx));
  for (Segment& segment : segments_) segment.pass.cut(HeadParts::cut_target(ctx));
  copy_to_device(ctx.device, id_map_, vocab_ids_.data(),
                 static_cast<int64_t>(4 * vocab_ids_.size()), ctx.stream);
  std::vector<int> predicting;
  for (int seq = 0; seq < limits_.max_seqs; ++seq) {
    for (int i = 0; i < largest_.depth; ++i) {
      predicting.push_back(seq * num_rows_ + predicts_from_ + i);
    }
  }
  copy_to_device(ctx.device, predicting_, predicting.data(),
                 static_cast<int64_t>(4 * predicting.size()), ctx.stream);
  fill_bytes(ctx.device, zeros_, 0, int64_t{4} * limits_.max_seqs * (num_rows_ - 1), ctx.stream);
  if (has_mask_embedding_ && model().embed_scale != 1) {
    embedding(ctx, {.out = mask_embedding_,
                    .table = mask_embedding_,
                    .ids = zeros_,
                    .scale = model().embed_scale});
  }
  synchronize(ctx.device, ctx.stream);  // the arrays lie in pageable memory
}

// ---- the passes

void BlockDrafter::append(const Layer& layer, OpList& ops) const {
  append_block(layer.attention_conv, *layer.blocks.attention, *layer.attention_norm, ops);
  append_block(layer.mlp_conv, *layer.blocks.mlp, *layer.mlp_norm, ops);
}

void BlockDrafter::append_block(const Conv& conv, const Block& block, const RmsNorm& norm,
                                OpList& ops) const {
  const Value hidden = parts_.hidden_value(ops), normed = parts_.normed_value(ops);
  norm.append(ops, normed, hidden);
  if (!has_conv()) return block.append(ops, hidden, normed);
  const Value delta = ops.value("conv_delta", delta_), mixed = ops.value("conv_mixed", mixed_),
              branch = ops.value("conv_branch", branch_);
  ops.linear(conv.name + ".kernel_projection", *conv.projection, delta, normed);
  append_conv(conv, 0, mixed, normed, ops);
  block.append(ops, branch, mixed);
  append_conv(conv, 1, hidden, branch, ops);
}

// Side 0: out = conv(x). Side 1: out += conv(x).
void BlockDrafter::append_conv(const Conv& conv, int side, const Value& out, const Value& x,
                               OpList& ops) const {
  const Value delta = ops.value("conv_delta", delta_);
  const Tensor base = conv.base.rows(int64_t{side} * conv_width_, conv_width_);
  std::vector<Value> reads{x, delta};
  if (side == 1) reads.push_back(out);
  ops.call(
      conv.name + (side == 0 ? ".in" : ".out"), reads, {out},
      [=, this](const Context& ctx, const Step&, const Rows& rows) {
        block_conv(ctx, {.out = rows(out),
                         .x = rows(x),
                         .base = base,
                         .delta = rows(delta),
                         .first = side * delta_columns(),
                         .group = conv_group_,
                         .num_rows = num_rows_,
                         .adds = side == 1});
      },
      base.num_bytes());
}

void BlockDrafter::store_context(const Context& ctx, const Step& step, const Tensor& x) {
  const int num_tokens = step.tokens.num_tokens;
  const Tensor hidden = parts_.hidden(num_tokens);
  fc_->forward(ctx, step.phase, hidden, x, 1, 0);
  context_norm_->forward(ctx, parts_.normed(num_tokens), hidden);
  context_pass_.replay(ctx, step);
}

void BlockDrafter::prefill(const Context& ctx, const DraftPrompt& prompt) {
  store_context(ctx, {.phase = Phase::kPrefill, .ids = prompt.ids, .tokens = prompt.tokens},
                prompt.hidden.layers);
}

// ---- drafting

void BlockDrafter::process_accepted(const Context& ctx, const DraftBatch& batch) {
  const MtpRows& rows = context_rows_;
  mtp_rows(ctx, {.window = limits_.max_path,
                 .num_seqs = batch.num_seqs,
                 .seq_slots = batch.seq_slots,
                 .slots = batch.slots,
                 .beam = {.num_seqs = batch.num_seqs, .topk = 1, .depth = 1},
                 .rows = rows});
  StepTokens tokens = batch.step_tokens();
  tokens.num_tokens = batch.num_seqs * limits_.max_path;
  tokens.max_seq_tokens = limits_.max_path;
  tokens.positions = rows.positions;
  tokens.token_seqs = rows.token_seqs;
  tokens.seq_token_begin = rows.seq_token_begin;
  tokens.slot_lengths = rows.lengths;
  const Tensor x = gathered_.rows(0, tokens.num_tokens);
  gather_rows(ctx, {.out = x, .x = batch.accepted.layers, .index = rows.hidden_rows});
  store_context(ctx, {.phase = Phase::kDecode, .ids = rows.ids, .tokens = tokens}, x);
  keep_context(ctx, parts_.normed(tokens.num_tokens), rows.last_rows, batch.num_seqs);
}

Tensor BlockDrafter::run_block(const Context& ctx, const DraftBatch& batch) {
  BlockRowsParams rows = rows_;
  rows.num_seqs = batch.num_seqs;
  rows.seq_slots = batch.seq_slots;
  rows.lengths = batch.slots.lengths;
  rows.next_tokens = batch.slots.next_tokens;
  block_rows(ctx, rows);
  StepTokens tokens = batch.step_tokens();
  tokens.num_tokens = batch.num_seqs * num_rows_;
  tokens.max_seq_tokens = num_rows_;
  tokens.positions = rows.positions;
  tokens.token_seqs = rows.token_seqs;
  tokens.seq_token_begin = rows.seq_token_begin;
  tokens.slot_lengths = batch.slots.lengths;
  const Tensor hidden = parts_.hidden(tokens.num_tokens);
  embedding(ctx, {.out = hidden,
                  .table = parts_.embedding_table(),
                  .ids = rows.ids,
                  .scale = model().embed_scale});
  if (has_mask_embedding_) {
    gather_rows(ctx, {.out = hidden,
                      .x = mask_embedding_,
                      .index = zeros_,
                      .out_index = rows.mask_rows,
                      .num_rows = batch.num_seqs * (num_rows_ - 1)});
  }
  for (const Segment& segment : segments_) {
    tokens.ancestor_masks = segment.causal ? nullptr : rows.all_masks;
    segment.pass.replay(ctx, {.phase = Phase::kDecode, .ids = rows.ids, .tokens = tokens});
  }
  const Tensor predicted = predicted_.rows(0, int64_t{batch.num_seqs} * largest_.depth);
  final_norm_->forward(ctx, predicted, hidden, 0, predicting_);
  return predicted;
}

Draft BlockDrafter::propose(const Context& ctx, const DraftBatch& batch) {
  process_accepted(ctx, batch);
  const Tensor hidden = run_block(ctx, batch);
  const Tensor logits = parts_.output().forward(ctx, hidden);
  if (model().logit_softcap > 0) softcap(ctx, {.x = logits, .cap = model().logit_softcap});
  topk_logprobs(ctx, {.logits = logits,
                      .topk = topk_,
                      .id_map = own_ids() ? nullptr : id_map_,
                      .tokens = candidate_ids_,
                      .logprobs = logprobs_});
  Draft draft = draft_;
  draft.num_tokens = batch.num_tokens();
  choose(ctx, batch,
         {.num_seqs = batch.num_seqs,
          .depth = largest_.depth,
          .topk = topk_,
          .ids = candidate_ids_,
          .logprobs = logprobs_,
          .hidden = hidden},
         draft);
  return draft;
}

void BlockDrafter::choose(const Context& ctx, const DraftBatch& batch, const Candidates& candidates,
                          const Draft& draft) {
  lattice_tree(ctx, {.lattice = score(ctx, batch, candidates),
                     .depth = batch.shape.depth,
                     .chain = is_chain(batch, draft),
                     .off_path = off_path(),
                     .draft = draft});
}

// ---- codebooks

void Codebooks::plan(MemoryPlan& plan, const ModelSpec& target, DType dtype, int64_t candidates,
                     int topk) {
  dtype_ = dtype;
  num_predecessors_ = target.vocab_size;
  const int64_t row_bytes = int64_t{rank_} * size_of(dtype);
  ids_[0] = plan.add(names_[0], "weights", num_predecessors_ * row_bytes);
  ids_[1] = plan.add(names_[1], "weights", num_successors_ * row_bytes);
  tokens_id_ = plan.add(names_[0] + ".tokens", "state", 4 * candidates * topk);
  pairs_id_ =
      plan.add_scratch(names_[0] + ".pairs", 4 * candidates * topk * topk, kSample, kSample);
}

void Codebooks::bind(const Arena& arena) {
  books_[0] = arena.tensor(ids_[0], dtype_, {num_predecessors_, rank_});
  books_[1] = arena.tensor(ids_[1], dtype_, {num_successors_, rank_});
  tokens_ = arena.array<int>(tokens_id_);
  pairs_ = arena.array<float>(pairs_id_);
}

void Codebooks::list_tensors(WeightTable& table) const {
  for (int i = 0; i < 2; ++i) table.add(names_[i], books_[i]);
}

Lattice Codebooks::score(const Context& ctx, PairScoresParams params) const {
  params.predecessors = books_[0];
  params.successors = books_[1];
  params.tokens = tokens_;
  params.pairs = pairs_;
  pair_scores(ctx, params);
  return {.num_seqs = params.block.num_seqs,
          .depth = params.block.depth,
          .topk = params.block.topk,
          .tokens = tokens_,
          .pairs = pairs_};
}

}  // namespace cpmcu
