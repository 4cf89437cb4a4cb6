// The number of tokens that one step drafts, and the shapes among which a step chooses.
#pragma once

#include <algorithm>
#include <compare>
#include <functional>
#include <vector>

namespace cpmcu {

// Depth 0: the step drafts nothing and verifies the root alone.
struct DraftShape {
  int depth = 0;      // maximum number of drafted tokens on a path
  int tree_size = 1;  // tokens that the step verifies, the root included
  auto operator<=>(const DraftShape&) const = default;

  bool within(const DraftShape& limit) const {
    return depth <= limit.depth && tree_size <= limit.tree_size;
  }
};

// Shapes up to `largest`, from small to large. `most_nodes`: the largest tree of a depth, its root
// included.
//
// Chains suit predictable text, where few tokens off the likeliest path are accepted. They also
// suit many sequences, where each row costs time. If `largest` is deep, only some depths of chains
// are included.
std::vector<DraftShape> smaller_shapes(const DraftShape& largest,
                                       const std::function<int(int depth)>& most_nodes);

// The same of a draft without branches.
std::vector<DraftShape> chain_shapes(const DraftShape& largest);

// The same of a tree that grows by `topk` nodes a level (num_candidates in kernels/tree/tree.h).
std::vector<DraftShape> beam_shapes(const DraftShape& largest, int topk);

}  // namespace cpmcu
