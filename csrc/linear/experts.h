// The same linear layer of all experts of a layer, in one buffer: gate and up, or down.
//
// An expert method is registered under the name of the linear method with the same checkpoint
// format (linear/linear.h), by REGISTER_EXPERTS.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/moe/sorted_gemm.h"
#include "linear/linear.h"

namespace cpmcu {

struct ExpertsConfig {
  std::string prefix;   // begins the experts' checkpoint names: "model.layers.3.mlp.experts."
  LinearConfig expert;  // its names are those within an expert, such as "gate_proj"
  int num_experts = 0;

  // Name prefix of the tensors of expert `index`: "model.layers.3.mlp.experts.7."
  std::string prefix_of(int index) const { return prefix + std::to_string(index) + "."; }
  // The parts of expert `index`, under their names in the checkpoint.
  std::vector<LinearPart> parts_of(int index) const {
    std::vector<LinearPart> parts = expert.parts;
    for (LinearPart& part : parts) part.name = prefix_of(index) + part.name;
    return parts;
  }
};

class ExpertLinear {
 public:
  virtual ~ExpertLinear() = default;
  virtual void plan(MemoryPlan& plan) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable& table) = 0;
  virtual void finish_loading(const Context&) {}
  // Bytes of one expert's weights; 0: unknown.
  virtual int64_t expert_bytes() const { return 0; }
  // As expert_gemm; gated if the config is.
  virtual void forward(const Context& ctx, const ExpertRows& rows) const = 0;
  // As sorted_gemm, for the rows of a prompt. Called only if has_sorted_gemm.
  virtual void forward_sorted(const Context& ctx, const SortedRows& rows) const = 0;
};

using ExpertRegistry = Registry<ExpertLinear, const ExpertsConfig&>;

// Throws if `method` has no experts.
inline std::unique_ptr<ExpertLinear> make_experts(const std::string& method,
                                                  const ExpertsConfig& config) {
  return ExpertRegistry::instance().create("expert method", method, config);
}

}  // namespace cpmcu

#define REGISTER_EXPERTS(name, Class)                                                      \
  static const bool registered_##Class = ::cpmcu::ExpertRegistry::instance().add(          \
      name,                                                                                \
      [](const ::cpmcu::ExpertsConfig& config) -> std::unique_ptr<::cpmcu::ExpertLinear> { \
        return std::make_unique<Class>(config);                                            \
      },                                                                                   \
      __FILE__)
