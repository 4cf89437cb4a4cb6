#include "spec/head_drafter.h"

#include <algorithm>

namespace cpmcu {

HeadDrafter::HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
                         int64_t fc_inputs)
    : BeamDrafter(spec, target), head_(spec_, target) {
  const ModelSpec& model = spec_.model;
  CHECK(model.hidden_size == target.hidden_size, "the {} head has hidden_size {}, the target {}",
        kind, model.hidden_size, target.hidden_size);
  fc_ = make_linear(model.linear_method_of("draft.fc"), {.parts = {{"draft.fc", model.hidden_size}},
                                                         .in_features = fc_inputs,
                                                         .dtype = model.dtype,
                                                         .options = model.linear_options});
}

HeadDrafter::Layer HeadDrafter::add_layer(const std::string& prefix, int kv_layer,
                                          int in_features) {
  const BlockConfig attention{.spec = spec_.model,
                              .prefix = prefix,
                              .scope = "draft.",
                              .kv_layer = kv_layer,
                              .in_features = in_features,
                              .window = spec_.window,
                              .phase = kMixer};
  BlockConfig mlp = attention;
  mlp.in_features = 0;
  mlp.phase = kMlp;
  blocks_.push_back(BlockRegistry::instance().create("block", "attention", attention));
  blocks_.push_back(BlockRegistry::instance().create("block", "mlp", mlp));
  return {.attention = blocks_.end()[-2].get(), .mlp = blocks_.back().get()};
}

RmsNorm* HeadDrafter::add_norm(const std::string& name) {
  norms_.push_back(std::make_unique<RmsNorm>(spec_.model, name));
  return norms_.back().get();
}

void HeadDrafter::plan(MemoryPlan& plan, const DraftLimits& limits) {
  BeamDrafter::plan(plan, limits);
  const int decode_rows = limits.max_seqs * std::max(spec_.depth + 1, spec_.topk);
  max_rows_ = std::max(limits.max_prompt_rows, decode_rows);
  const StepLimits step{.max_rows = static_cast<int>(max_rows_),
                        .max_decode_rows = decode_rows,
                        .max_model_len = limits.max_model_len,
                        .compute_capability = limits.compute_capability};
  make_layers(limits.first_kv_layer);
  fc_->plan(plan, step);
  for (const auto& block : blocks_) block->plan(plan, step);
  for (const auto& norm : norms_) norm->plan(plan);
  head_.plan(plan, step);
  const int64_t bytes = max_rows_ * width() * size_of(spec_.model.dtype);
  both_id_ = plan.add_scratch("draft.concat", 2 * bytes, 0, kSample);
  hidden_id_ = plan.add_scratch("draft.hidden", bytes, 0, kSample);
  normed_id_ = plan.add_scratch("draft.normed", bytes, 0, kSample);
}

void HeadDrafter::bind(const Arena& arena) {
  BeamDrafter::bind(arena);
  fc_->bind(arena);
  for (const auto& block : blocks_) block->bind(arena);
  for (const auto& norm : norms_) norm->bind(arena);
  head_.bind(arena);
  const DType dtype = spec_.model.dtype;
  both_ = arena.tensor(both_id_, dtype, {max_rows_, 2 * width()});
  hidden_ = arena.tensor(hidden_id_, dtype, {max_rows_, width()});
  normed_ = arena.tensor(normed_id_, dtype, {max_rows_, width()});
}

void HeadDrafter::list_tensors(WeightTable& table) {
  fc_->list_tensors(table);
  for (const auto& block : blocks_) block->list_tensors(table);
  for (const auto& norm : norms_) norm->list_tensors(table);
  head_.list_tensors(table);
}

void HeadDrafter::finish_loading(const Context& ctx, const TargetParts& target) {
  BeamDrafter::finish_loading(ctx, target);
  embedding_table_ = target.embedding_table;
  fc_->finish_loading(ctx);
  for (const auto& block : blocks_) block->finish_loading(ctx);
  head_.finish_loading(ctx, target);
}

Tensor HeadDrafter::half(int rows, int64_t first_column) const {
  return Tensor(both_.as<char>() + first_column * size_of(both_.dtype()), both_.dtype(),
                {rows, width()});
}

}  // namespace cpmcu
