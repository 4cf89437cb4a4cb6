// A small language model with the target's tokenizer: "model". If top-k is 1 it drafts a chain,
// otherwise a tree.
#include "speculative/model_drafter.h"

namespace cpmcu {
namespace {

class LanguageModel : public ModelDrafter {
 public:
  LanguageModel(const DrafterSpec& spec, const ModelSpec& target) : ModelDrafter(spec, target) {
    spec_.options.check_known("a draft model", {"window", "topk"});
  }
};

REGISTER_DRAFTER("model", LanguageModel);

}  // namespace
}  // namespace cpmcu
