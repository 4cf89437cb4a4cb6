// A block is a part of a layer: attention, an MLP, later others. It owns its weights, asks for its
// workspace, and declares the state that it keeps of a sequence. A kind of block is one file that
// ends in REGISTER_BLOCK("name", Class); a model names it in its spec.
#pragma once

#include <memory>
#include <string>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/step/step.h"
#include "state/model_state.h"

namespace cpmcu {

struct BlockConfig {
  const ModelSpec& spec;
  Params params{};          // of this block, instead of the spec's numbers
  std::string prefix;       // of checkpoint names: "model.layers.3."
  std::string scope;        // of scratch that belongs to one model: "" or "draft."
  int in_features = 0;      // width of x; 0: hidden_size
  Timeline phase = kMixer;  // kMixer or kMlp: when the block's scratch is alive
};

class Block {
 public:
  virtual ~Block() = default;
  virtual void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) = 0;
  virtual void bind(const Arena& arena, const ModelState& state) = 0;
  virtual void list_tensors(WeightTable& table) = 0;
  virtual void finish_loading(const Context& ctx) = 0;
  // Name of the checkpoint's norm in front of the block, without ".weight".
  virtual std::string norm_name() const = 0;
  // hidden [T, H] += residual_scale * block(x [T, H]); x is the normed hidden. A prefill accepts
  // all tokens; after a decode step of the target `commit` names the accepted ones.
  virtual void forward(const Context& ctx, const Step& step, const Tensor& hidden,
                       const Tensor& x) const = 0;
  // After a decode step of the target: updates the state that `ModelState::commit` does not move,
  // per-slot tensors and planes with fewer rows than tokens. Not called for a draft's blocks.
  // Graph-safe.
  virtual void commit(const Context&, const Step&, const Accepted&) const {}
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
