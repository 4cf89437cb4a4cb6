// Rotary frequencies in device memory. They come from the spec, not from the checkpoint.
#pragma once

#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "kernels/step/step.h"

namespace cpmcu {

class RotaryTable {
 public:
  // Tables of the same name share one buffer.
  void plan(MemoryPlan& plan, const std::string& name, std::vector<float> inv_freq) {
    inv_freq_ = std::move(inv_freq);
    id_ = plan.add_scratch(name, num_bytes(), 0, kLoad);
  }
  void bind(const Arena& arena) { device_ = arena.array<float>(id_); }
  void upload(const Context& ctx) {
    copy_to_device(ctx.device, device_, inv_freq_.data(), num_bytes(), ctx.stream);
    synchronize(ctx.device, ctx.stream);
  }
  const float* inv_freq() const { return device_; }
  int width() const { return 2 * static_cast<int>(inv_freq_.size()); }

 private:
  int64_t num_bytes() const { return static_cast<int64_t>(4 * inv_freq_.size()); }

  std::vector<float> inv_freq_;  // [width / 2] radians per position
  MemoryPlan::Id id_ = 0;
  float* device_ = nullptr;
};

}  // namespace cpmcu
