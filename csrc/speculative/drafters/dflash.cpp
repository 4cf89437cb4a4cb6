// DFlash and JetSpec heads, and DeepSpec's without a Markov head: "dflash". The candidates of a
// position have their own log-probabilities, whatever comes before them.
// Sources: arXiv:2602.06036 (DFlash), arXiv:2606.18394 (JetSpec: its blocks are causal).
#include <cmath>

#include "speculative/block_drafter.h"

namespace cpmcu {
namespace {

// Multiplies the probability of a token whose parent is not on the likeliest path. A draft that
// bets on one continuation is right less often there. A draft of plain marginals is not. 0.6 costs
// neither of them more than 1 % of the tokens a step (docs/notebook/speculation.md).
constexpr float kOffPath = 0.6f;

class DFlashDrafter : public BlockDrafter {
 public:
  DFlashDrafter(const DrafterSpec& spec, const ModelSpec& target)
      : BlockDrafter(spec, target, "DFlash") {}

 protected:
  float off_path() const override { return std::log(kOffPath); }
};

REGISTER_DRAFTER("dflash", DFlashDrafter);

}  // namespace
}  // namespace cpmcu
