#include "speculative/head_parts.h"

namespace cpmcu {

HeadParts::HeadParts(const DrafterSpec& spec, const std::vector<int>& vocab_ids,
                     const ModelSpec& target, const std::string& kind)
    : scope_(spec.scope), model_(*spec.model), head_(spec, vocab_ids, target) {
  CHECK(model_.hidden_size == target.hidden_size,
        "the {} head has hidden_size {}, expected the target's {}", kind, model_.hidden_size,
        target.hidden_size);
}

std::unique_ptr<LinearMethod> HeadParts::make_layer(const ModelSpec& model, const std::string& name,
                                                    int64_t in_features, int64_t out_features) {
  return make_linear(model.linear_method_of(name), {.parts = {{name, out_features}},
                                                    .in_features = in_features,
                                                    .dtype = model.dtype,
                                                    .options = model.linear_options_of(name)});
}

LinearMethod* HeadParts::add_linear(const std::string& name, int64_t in_features,
                                    int64_t out_features) {
  linears_.push_back(
      make_layer(model_, name, in_features, out_features > 0 ? out_features : width()));
  return linears_.back().get();
}

HeadParts::Layer HeadParts::add_layer(const std::string& prefix, const LayerSpec& layer,
                                      int in_features, bool adds) {
  CHECK(layer.size() == 2, "a layer of a draft head has {} blocks, expected 2", layer.size());
  const BlockConfig attention{.spec = model_,
                              .params = layer[0].params,
                              .prefix = prefix,
                              .scope = scope_,
                              .in_features = in_features,
                              .phase = kMixer,
                              .adds = adds};
  const BlockConfig mlp{.spec = model_,
                        .params = layer[1].params,
                        .prefix = prefix,
                        .scope = scope_,
                        .phase = kMlp,
                        .adds = adds};
  blocks_.push_back(BlockRegistry::instance().create("block", layer[0].kind, attention));
  blocks_.push_back(BlockRegistry::instance().create("block", layer[1].kind, mlp));
  return {.attention = blocks_.end()[-2].get(), .mlp = blocks_.back().get()};
}

RmsNorm* HeadParts::add_norm(const std::string& name, int64_t size) {
  norms_.push_back(std::make_unique<RmsNorm>(model_, name, size));
  return norms_.back().get();
}

void HeadParts::plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits,
                     int max_logit_rows) {
  max_tokens_ = limits.max_tokens;
  for (const auto& linear : linears_) linear->plan(plan, limits);
  for (const auto& block : blocks_) block->plan(plan, state, limits);
  for (const auto& norm : norms_) norm->plan(plan);
  StepLimits of_head = limits;
  of_head.max_decode_tokens = max_logit_rows;
  head_.plan(plan, of_head);
  const int64_t bytes = max_tokens_ * width() * size_of(model_.dtype);
  hidden_id_ = plan.add_scratch(scope_ + "hidden", bytes, 0, kSample);
  normed_id_ = plan.add_scratch(scope_ + "normed", bytes, 0, kSample);
}

void HeadParts::bind(const Arena& arena, const ModelState& state) {
  for (const auto& linear : linears_) linear->bind(arena);
  for (const auto& block : blocks_) block->bind(arena, state);
  for (const auto& norm : norms_) norm->bind(arena);
  head_.bind(arena);
  hidden_ = arena.tensor(hidden_id_, model_.dtype, {max_tokens_, width()});
  normed_ = arena.tensor(normed_id_, model_.dtype, {max_tokens_, width()});
}

void HeadParts::list_tensors(WeightTable& table) {
  for (const auto& linear : linears_) linear->list_tensors(table);
  for (const auto& block : blocks_) block->list_tensors(table);
  for (const auto& norm : norms_) norm->list_tensors(table);
  head_.list_tensors(table);
}

void HeadParts::finish_loading(const Context& ctx, const TargetParts& target) {
  embedding_table_ = target.embedding_table;
  for (const auto& linear : linears_) linear->finish_loading(ctx);
  for (const auto& block : blocks_) block->finish_loading(ctx);
  head_.finish_loading(ctx, target);
}

}  // namespace cpmcu
