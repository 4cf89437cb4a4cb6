#include "spec/drafter.h"

namespace cpmcu {

void DrafterSpec::check_validity(const ModelSpec& target) const {
  CHECK(depth >= 1 && depth <= kMaxDraftDepth, "the draft depth is {}, expected 1 to {}", depth,
        kMaxDraftDepth);
  CHECK(topk >= 1 && topk <= kMaxTopk, "the draft's top-k is {}, expected 1 to {}", topk, kMaxTopk);
  CHECK(topk * (depth - 1) <= kMaxTreeSize,
        "top-k {} x (depth {} - 1) makes {} draft rows, the tree masks hold {}", topk, depth,
        topk * (depth - 1), kMaxTreeSize);
  CHECK(tree_size >= 1 && tree_size <= kMaxTreeSize, "the tree size is {}, expected 1 to {}",
        tree_size, kMaxTreeSize);
  CHECK(tree_size - 1 <= num_candidates(topk, depth),
        "a tree of {} nodes needs {} candidates, top-k {} and depth {} make {}", tree_size,
        tree_size - 1, topk, depth, num_candidates(topk, depth));
  CHECK(window >= 0, "the draft window is {}, expected at least 0", window);
  for (int id : vocab_ids) {
    CHECK(id >= 0 && id < target.vocab_size,
          "the draft vocabulary names token {}, the target has {}", id, target.vocab_size);
  }
  for (int layer : feature_layers) {
    CHECK(layer >= 0 && layer < target.num_hidden_layers,
          "the draft wants the input of layer {}, the target has {}", layer,
          target.num_hidden_layers);
  }
}

}  // namespace cpmcu
