// The rotary frequencies on the device. They come from the spec, not from the checkpoint, and are
// one buffer for all layers of a model.
#pragma once

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "kernels/step.h"

namespace cpmcu {

class RotaryTable {
 public:
  void plan(MemoryPlan& plan, const ModelSpec& spec, const std::string& scope) {
    id_ = plan.add_scratch(scope + "rotary.inv_freq", int64_t{4} * spec.head_dim / 2, 0, kLoad);
  }
  void bind(const Arena& arena) { inv_freq_ = arena.array<float>(id_); }
  void upload(const Context& ctx, const ModelSpec& spec) {
    copy_to_device(ctx.device, inv_freq_, spec.rope_inv_freq.data(),
                   static_cast<int64_t>(4 * spec.rope_inv_freq.size()), ctx.stream);
    synchronize(ctx.device, ctx.stream);
  }
  const float* inv_freq() const { return inv_freq_; }

 private:
  MemoryPlan::Id id_ = 0;
  float* inv_freq_ = nullptr;  // [D / 2]
};

}  // namespace cpmcu
