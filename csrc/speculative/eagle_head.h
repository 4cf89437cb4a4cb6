// A head of EAGLE's form, in one or several modules. A module is
//
//   x = fc [embedding(id) | aux_hidden] (+ bias)
//   hidden = decoder layers(x); logits = the target's lm_head of hidden
//
// Some heads RMS-norm both halves of fc's input, and `hidden`.
#pragma once

#include <string>
#include <vector>

#include "speculative/head_drafter.h"

namespace cpmcu {

class EagleHead : public HeadDrafter {
 public:
  HiddenNeeds needs() const override { return {.final = true}; }
  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override;
  void bind(const Arena& arena) override;
  void list_tensors(WeightTable& table) override;
  void finish_loading(const Context& ctx, const TargetParts& target) override;

 protected:
  // Parts that only some kinds of heads have.
  struct Form {
    bool input_norms = false;      // both halves of fc's input have an RMSNorm
    bool first_attention = false;  // the first layer has a norm before its attention
    bool final_norm = false;       // the head's hidden states have a norm at the end
    bool hidden_first = false;     // fc's input is [aux_hidden | embedding(id)]
    bool bias = false;             // fc has a bias
  };

  // The form of an MTP module.
  static Form mtp_form(const DrafterSpec& spec) {
    return {.input_norms = true,
            .first_attention = true,
            .final_norm = true,
            .hidden_first = spec.options.flag("hidden_first", false)};
  }

  // Module i of several has the tensors "<scope>modules.<i>.*"; a single module has "<scope>*".
  EagleHead(const DrafterSpec& spec, const ModelSpec& target, const std::string& kind,
            const Form& form, int num_modules = 1);

  Tensor select_hidden(const HiddenStates& states) const override { return states.final; }
  Tensor forward(const Context& ctx, const Step& step, const HiddenRows& aux_hidden,
                 Source) override {
    return run_module(ctx, 0, step, aux_hidden);
  }
  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return parts_.output().forward(ctx, hidden);
  }
  int num_modules() const { return static_cast<int>(modules_.size()); }
  // `forward` of one module.
  Tensor run_module(const Context& ctx, int module, const Step& step, const HiddenRows& aux_hidden);

 private:
  struct NormedLayer {
    HeadParts::Layer blocks;
    RmsNorm* attention_norm;  // null: no norm before attention
    RmsNorm* mlp_norm;
  };
  struct Module {
    LinearMethod* fc;
    RmsNorm *embed_norm = nullptr, *aux_hidden_norm = nullptr, *final_norm = nullptr;
    std::vector<NormedLayer> layers{};
    Pass pass{};  // runs fc and the layers
  };

  Module make_module(const std::string& prefix);
  void append(const Module& module, OpList& ops) const;

  const Form form_;
  std::vector<Module> modules_;
  MemoryPlan::Id bias_id_ = 0, zeros_id_ = 0;
  int* zeros_ = nullptr;
  Tensor bias_;
};

}  // namespace cpmcu
