#include "speculative/head_drafter.h"

namespace cpmcu {

HeadDrafter::HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind)
    : BeamDrafter(spec, target), head_(spec_, vocab_ids_, target) {
  const ModelSpec& model = this->model();
  CHECK(model.hidden_size == target.hidden_size,
        "the {} head has hidden_size {}, expected the target's {}", kind, model.hidden_size,
        target.hidden_size);
}

LinearMethod* HeadDrafter::add_fc(const std::string& name, int64_t in_features) {
  const ModelSpec& model = this->model();
  fcs_.push_back(
      make_linear(model.linear_method_of(name), {.parts = {{name, model.hidden_size}},
                                                 .in_features = in_features,
                                                 .dtype = model.dtype,
                                                 .options = model.linear_options_of(name)}));
  return fcs_.back().get();
}

HeadDrafter::Layer HeadDrafter::add_layer(const std::string& prefix, int in_features,
                                          const LayerSpec& layer) {
  CHECK(layer.size() == 2, "a layer of a draft head has {} blocks, expected 2", layer.size());
  BlockConfig attention{.spec = model(),
                        .params = layer[0].params,
                        .prefix = prefix,
                        .scope = spec_.scope,
                        .in_features = in_features,
                        .phase = kMixer};
  attention.params.set("window", int64_t{spec_.options.integer("window", 0)});
  const BlockConfig mlp{.spec = model(),
                        .params = layer[1].params,
                        .prefix = prefix,
                        .scope = spec_.scope,
                        .phase = kMlp};
  blocks_.push_back(BlockRegistry::instance().create("block", layer[0].kind, attention));
  blocks_.push_back(BlockRegistry::instance().create("block", layer[1].kind, mlp));
  return {.attention = blocks_.end()[-2].get(), .mlp = blocks_.back().get()};
}

RmsNorm* HeadDrafter::add_norm(const std::string& name, int64_t size) {
  norms_.push_back(std::make_unique<RmsNorm>(model(), name, size));
  return norms_.back().get();
}

void HeadDrafter::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  BeamDrafter::plan(plan, states, limits);
  const StepLimits step = step_limits();
  max_tokens_ = step.max_tokens;
  for (const auto& fc : fcs_) fc->plan(plan, step);
  for (const auto& block : blocks_) block->plan(plan, state(), step);
  for (const auto& norm : norms_) norm->plan(plan);
  head_.plan(plan, step);
  const int64_t bytes = max_tokens_ * width() * size_of(model().dtype);
  both_id_ = plan.add_scratch(spec_.scope + "concat", 2 * bytes, 0, kMixer + 1);
  hidden_id_ = plan.add_scratch(spec_.scope + "hidden", bytes, 0, kSample);
  normed_id_ = plan.add_scratch(spec_.scope + "normed", bytes, 0, kSample);
}

void HeadDrafter::bind(const Arena& arena) {
  BeamDrafter::bind(arena);
  for (const auto& fc : fcs_) fc->bind(arena);
  for (const auto& block : blocks_) block->bind(arena, state());
  for (const auto& norm : norms_) norm->bind(arena);
  head_.bind(arena);
  const DType dtype = model().dtype;
  both_ = arena.tensor(both_id_, dtype, {max_tokens_, 2 * width()});
  hidden_ = arena.tensor(hidden_id_, dtype, {max_tokens_, width()});
  normed_ = arena.tensor(normed_id_, dtype, {max_tokens_, width()});
}

void HeadDrafter::list_tensors(WeightTable& table) {
  for (const auto& fc : fcs_) fc->list_tensors(table);
  for (const auto& block : blocks_) block->list_tensors(table);
  for (const auto& norm : norms_) norm->list_tensors(table);
  head_.list_tensors(table);
}

void HeadDrafter::finish_loading(const Context& ctx, const TargetParts& target) {
  BeamDrafter::finish_loading(ctx, target);
  embedding_table_ = target.embedding_table;
  for (const auto& fc : fcs_) fc->finish_loading(ctx);
  for (const auto& block : blocks_) block->finish_loading(ctx);
  head_.finish_loading(ctx, target);
}

Tensor HeadDrafter::half(int num_tokens, int64_t first_column) const {
  return Tensor(both_.as<char>() + first_column * size_of(both_.dtype()), both_.dtype(),
                {num_tokens, width()});
}

}  // namespace cpmcu
