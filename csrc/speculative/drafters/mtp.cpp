// Multi-token prediction with one module, which runs once for each level: "mtp". It is a head of
// EAGLE's form. For a drafted token, aux_hidden is the module's own hidden state of the parent.
//
//   x = fc [norm(embedding(id)) | norm(aux_hidden)]
//   hidden = norm(decoder layer(x)); logits = the target's lm_head of hidden
//
// mtp_modules.cpp has several modules. Source: DeepSeek-AI, arXiv:2412.19437, 2.2.
#include "speculative/eagle_head.h"

namespace cpmcu {
namespace {

class MtpDrafter : public EagleHead {
 public:
  MtpDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : EagleHead(spec, target, "MTP", mtp_form(spec)) {
    spec_.options.check_known("an MTP head", {"topk", "vocab_ids", "hidden_first"});
    CHECK(model().num_hidden_layers == 1, "an MTP module has {} layers, expected 1",
          model().num_hidden_layers);
  }
};

REGISTER_DRAFTER("mtp", MtpDrafter);

}  // namespace
}  // namespace cpmcu
