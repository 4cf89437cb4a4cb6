#include "speculative/head_drafter.h"

#include <utility>

namespace cpmcu {

HeadDrafter::HeadDrafter(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind)
    : BeamDrafter(spec, target), parts_(spec_, vocab_ids_, target, kind) {}

HeadParts::Layer HeadDrafter::add_layer(const std::string& prefix, int in_features,
                                        LayerSpec layer) {
  layer.at(0).params.set("window", int64_t{spec_.options.integer("window", 0)});
  return parts_.add_layer(prefix, layer, in_features);
}

void HeadDrafter::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  BeamDrafter::plan(plan, states, limits);
  const StepLimits step = step_limits();
  parts_.plan(plan, state(), step, step.max_decode_tokens);
  both_id_ =
      plan.add_scratch(spec_.scope + "concat",
                       2 * step.max_tokens * width() * size_of(model().dtype), 0, kMixer + 1);
}

void HeadDrafter::bind(const Arena& arena) {
  BeamDrafter::bind(arena);
  parts_.bind(arena, state());
  both_ = arena.tensor(both_id_, model().dtype, {parts_.max_tokens(), 2 * width()});
}

void HeadDrafter::finish_loading(const Context& ctx, const TargetParts& target) {
  BeamDrafter::finish_loading(ctx, target);
  parts_.finish_loading(ctx, target);
}

Tensor HeadDrafter::half(int num_tokens, int64_t first_column) const {
  return Tensor(both_.as<char>() + first_column * size_of(both_.dtype()), both_.dtype(),
                {num_tokens, width()});
}

}  // namespace cpmcu
