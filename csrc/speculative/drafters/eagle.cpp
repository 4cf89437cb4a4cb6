// EAGLE and EAGLE-2 heads, and MiniCPM4's variant of them: "eagle".
//
//   x = fc [embedding(id) | aux_hidden] (+ bias)
//   hidden = decoder layer(x); logits = the target's lm_head of hidden
//
// MiniCPM4's variant RMS-norms both halves of fc's input.
//
// `aux_hidden` is the target's final hidden state of the preceding token. For a drafted token it is
// the draft's hidden state of the parent token.
// Sources: Li et al., arXiv:2401.15077 and arXiv:2406.16858.
#include "speculative/eagle_head.h"

namespace cpmcu {
namespace {

class EagleDrafter : public EagleHead {
 public:
  EagleDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : EagleHead(spec, target, "EAGLE",
                  {.input_norms = spec.options.flag("input_norms", false),
                   .first_attention = spec.options.flag("attention_norm", false),
                   .bias = spec.options.flag("fc_bias", false)}) {
    spec_.options.check_known("an EAGLE head", {"window", "topk", "vocab_ids", "own_head",
                                                "input_norms", "attention_norm", "fc_bias"});
  }
};

REGISTER_DRAFTER("eagle", EagleDrafter);

}  // namespace
}  // namespace cpmcu
