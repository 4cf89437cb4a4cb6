#include "speculative/drafter.h"

namespace cpmcu {

void DrafterSpec::check_validity() const {
  CHECK(depth >= 1 && depth <= kMaxDraftDepth, "the draft depth is {}, expected 1 to {}", depth,
        kMaxDraftDepth);
  CHECK(topk >= 1 && topk <= kMaxTopk, "the draft's top-k is {}, expected 1 to {}", topk, kMaxTopk);
  CHECK(topk * (depth - 1) <= kMaxTreeSize,
        "top-k {} x (depth {} - 1) is {} drafted tokens, the tree masks hold at most {}", topk,
        depth, topk * (depth - 1), kMaxTreeSize);
  CHECK(tree_size >= 1 && tree_size <= kMaxTreeSize, "the tree size is {}, expected 1 to {}",
        tree_size, kMaxTreeSize);
  CHECK(tree_size - 1 <= num_candidates(topk, depth),
        "a tree of {} nodes needs {} candidates, top-k {} and depth {} yield {}", tree_size,
        tree_size - 1, topk, depth, num_candidates(topk, depth));
}

HiddenNeeds HiddenNeeds::with(const HiddenNeeds& other) const {
  CHECK(layers.empty() || other.layers.empty() || layers == other.layers,
        "two drafters read {} and {} layers of the target, expected the same layers", layers.size(),
        other.layers.size());
  return {.final = final || other.final, .layers = layers.empty() ? other.layers : layers};
}

std::unique_ptr<Drafter> make_drafter(const DrafterSpec& spec, const ModelSpec& target) {
  spec.check_validity();
  return DrafterRegistry::instance().create("drafter", spec.method, spec, target);
}

}  // namespace cpmcu
