// What a layer is made of: attention, an MLP, later others. Each owns its weights and asks for its
// workspace. A block is one file here that ends in REGISTER_BLOCK("name", Class); a model names it
// in its spec.
#pragma once

#include <memory>
#include <string>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/step.h"
#include "layers/kv_cache.h"

namespace cpmcu {

struct BlockConfig {
  const ModelSpec& spec;
  std::string prefix;  // "model.layers.3."
  int layer = 0;
  Timeline phase = kMixer;  // kMixer or kMlp: when the block's scratch is alive
};

class Block {
 public:
  virtual ~Block() = default;
  virtual void plan(MemoryPlan& plan, const StepLimits& limits) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable& table) = 0;
  virtual void finish_loading(const Context& ctx) = 0;
  // Name of the checkpoint's norm in front of the block, without ".weight".
  virtual std::string norm_name() const = 0;
  // hidden [T, H] += residual_scale * block(x [T, H]); x is the normed hidden.
  virtual void forward(const Context& ctx, const Step& step, const Tensor& hidden, const Tensor& x,
                       const KvCache& cache) const = 0;
};

using BlockRegistry = Registry<Block, const BlockConfig&>;

}  // namespace cpmcu

#define REGISTER_BLOCK(name, Class)                                               \
  static const bool registered_##Class = ::cpmcu::BlockRegistry::instance().add(  \
      name,                                                                       \
      [](const ::cpmcu::BlockConfig& config) -> std::unique_ptr<::cpmcu::Block> { \
        return std::make_unique<Class>(config);                                   \
      },                                                                          \
      __FILE__)
