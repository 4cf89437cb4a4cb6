#include "speculative/drafter.h"

namespace cpmcu {

DraftShape Drafter::shrunk(const DraftShape& limit) const {
  DraftShape found;
  for (const DraftShape& shape : shapes()) {
    if (shape.within(limit)) found = std::max(found, shape);
  }
  return found;
}

HiddenNeeds HiddenNeeds::with(const HiddenNeeds& other) const {
  CHECK(layers.empty() || other.layers.empty() || layers == other.layers,
        "two drafters read {} and {} layers of the target, expected the same layers", layers.size(),
        other.layers.size());
  return {.final = final || other.final, .layers = layers.empty() ? other.layers : layers};
}

std::unique_ptr<Drafter> make_drafter(const DrafterSpec& spec, const ModelSpec& target) {
  auto drafter = DrafterRegistry::instance().create("drafter", spec.method, spec, target);
  const DraftShape largest = drafter->largest();
  CHECK(largest.depth >= 1 && largest.depth <= kMaxDraftDepth,
        "the draft depth of \"{}\" is {}, expected 1 to {}", spec.method, largest.depth,
        kMaxDraftDepth);
  CHECK(largest.tree_size >= 1 && largest.tree_size <= kMaxTreeSize,
        "the tree size of \"{}\" is {}, expected 1 to {}", spec.method, largest.tree_size,
        kMaxTreeSize);
  CHECK(drafter->fits(largest), "the drafter \"{}\" does not fit its largest shape, {} and {}",
        spec.method, largest.depth, largest.tree_size);
  return drafter;
}

}  // namespace cpmcu
