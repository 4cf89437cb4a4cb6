// A block is a part of a layer, such as attention or an MLP. It owns its weights, plans its scratch
// memory, and declares the state that it keeps for each sequence. A kind of block is one file that
// ends in REGISTER_BLOCK("name", Class); a model names the kind in its spec.
#pragma once

#include <memory>
#include <string>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/step/step.h"
#include "layers/norm.h"
#include "pass/op_list.h"
#include "state/model_state.h"

namespace cpmcu {

struct BlockConfig {
  const ModelSpec& spec;
  Params params{};      // parameters of this block; they override the numbers of `spec`
  std::string prefix;   // begins the block's checkpoint names: "model.layers.3."
  std::string scope;    // begins the names of scratch that one model does not share: "" or "draft."
  int in_features = 0;  // width of the block's input x; 0: hidden_size
  Timeline phase = kMixer;  // first phase of the block's scratch: kMixer or kMlp
  bool adds = true;  // false: the block overwrites `hidden` with block(x), for a norm of the output
};

class Block {
 public:
  virtual ~Block() = default;
  virtual void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) = 0;
  virtual void bind(const Arena& arena, const ModelState& state) = 0;
  virtual void list_tensors(WeightTable& table) = 0;
  virtual void finish_loading(const Context& ctx) = 0;
  // Checkpoint name of the norm before the block, without ".weight".
  virtual std::string norm_name() const = 0;
  // Appends the ops of hidden [T, H] += residual_scale * block(x [T, H]); x is `hidden` after the
  // norm. Without BlockConfig::adds, `hidden` is another value, which the block overwrites. Called
  // once for each phase, after `bind`. All tokens of a prefill are accepted.
  virtual void append(OpList& ops, const Value& hidden, const Value& x) const = 0;
  // Appends the ops that run after a decode step of the target, when `Step::accepted` has the
  // tokens that it accepted. They update the state that `ModelState::commit` does not move:
  // per-slot tensors, and planes with fewer rows than tokens. Not called for the blocks of a draft.
  virtual void append_commit(OpList&) const {}
  // Appends the ops that store the keys and values of x [T, H], and no others of `append`. Only an
  // attention block has them.
  virtual void append_keys(OpList&, const Value&) const {
    CHECK_STATE(false, "append_keys was called on a block that stores no keys");
  }
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
