#include "speculative/eagle_head.h"

#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"

namespace cpmcu {

EagleHead::EagleHead(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
                     const Form& form, int num_modules)
    : HeadDrafter(spec, target, kind), form_(form) {
  for (int i = 0; i < num_modules; ++i) {
    const std::string module = num_modules == 1 ? "" : "modules." + std::to_string(i) + ".";
    modules_.push_back(make_module(spec_.scope + module));
  }
}

EagleHead::Module EagleHead::make_module(const std::string& prefix) {
  Module module{.fc = parts_.add_linear(prefix + "fc", 2 * width())};
  if (form_.input_norms) {
    module.embed_norm = parts_.add_norm(prefix + "input_norm1");
    module.aux_hidden_norm = parts_.add_norm(prefix + "input_norm2");
  }
  for (int i = 0; i < model().num_hidden_layers; ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    const bool has_norm = i > 0 || form_.first_attention;
    module.layers.push_back(
        {.blocks = add_layer(layer, 0, model().layer(i)),
         .attention_norm = has_norm ? parts_.add_norm(layer + "input_layernorm") : nullptr,
         .mlp_norm = parts_.add_norm(layer + "post_attention_layernorm")});
  }
  if (form_.final_norm) module.final_norm = parts_.add_norm(prefix + "norm");
  return module;
}

void EagleHead::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  HeadDrafter::plan(plan, states, limits);
  if (!form_.bias) return;
  bias_id_ = plan.add(spec_.scope + "fc.bias", "weights", width() * size_of(model().dtype));
  zeros_id_ = plan.add(spec_.scope + "zeros", "state", 4 * parts_.max_tokens());
}

void EagleHead::bind(const Arena& arena) {
  HeadDrafter::bind(arena);
  for (Module& module : modules_) {
    module.pass.append([&](OpList& ops) { append(module, ops); });
  }
  if (!form_.bias) return;
  bias_ = arena.tensor(bias_id_, model().dtype, {1, width()});
  zeros_ = arena.array<int>(zeros_id_);
}

void EagleHead::list_tensors(WeightTable& table) {
  HeadDrafter::list_tensors(table);
  if (form_.bias) table.add(spec_.scope + "fc.bias", bias_.view({width()}));
}

void EagleHead::append(const Module& module, OpList& ops) const {
  const Value hidden = parts_.hidden_value(ops), normed = parts_.normed_value(ops);
  ops.add_linear(spec_.scope + "fc", *module.fc, hidden, both_value(ops), 1, form_.bias);
  for (const auto& [blocks, attention_norm, mlp_norm] : module.layers) {
    if (attention_norm) attention_norm->append(ops, normed, hidden);
    blocks.attention->append(ops, hidden, attention_norm ? normed : hidden);
    mlp_norm->append(ops, normed, hidden);
    blocks.mlp->append(ops, hidden, normed);
  }
}

void EagleHead::finish_loading(const Context& ctx, const TargetParts& target) {
  HeadDrafter::finish_loading(ctx, target);
  for (Module& module : modules_) module.pass.cut(HeadParts::cut_target(ctx));
  if (form_.bias) fill_bytes(ctx.device, zeros_, 0, 4 * parts_.max_tokens(), ctx.stream);
}

Tensor EagleHead::run_module(const Context& ctx, int index, const Step& step,
                             const HiddenRows& aux_hidden) {
  const Module& module = modules_[static_cast<size_t>(index)];
  const int num_tokens = step.tokens.num_tokens;
  const Tensor hidden = parts_.hidden(num_tokens), normed = parts_.normed(num_tokens);
  const bool hidden_first = form_.hidden_first;
  const Tensor embedded = hidden_first ? right(num_tokens) : left(num_tokens);
  const Tensor of_token = hidden_first ? left(num_tokens) : right(num_tokens);
  embedding(ctx, {.out = module.embed_norm ? normed : embedded,
                  .table = parts_.embedding_table(),
                  .ids = step.ids,
                  .scale = model().embed_scale,
                  .out_stride = module.embed_norm ? width() : 2 * width()});
  if (module.embed_norm) {
    module.embed_norm->forward(ctx, embedded, normed, 2 * width());
    module.aux_hidden_norm->forward(ctx, of_token, aux_hidden.x, 2 * width(), aux_hidden.index);
  } else {
    gather_rows(
        ctx,
        {.out = of_token, .x = aux_hidden.x, .index = aux_hidden.index, .out_stride = 2 * width()});
  }
  if (form_.bias) gather_rows(ctx, {.out = hidden, .x = bias_, .index = zeros_});
  module.pass.replay(ctx, step);
  if (module.final_norm) module.final_norm->forward(ctx, hidden, hidden);
  return hidden;
}

}  // namespace cpmcu
