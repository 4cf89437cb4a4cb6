#include "speculative/shape.h"

#include <cmath>
#include <set>

#include "kernels/tree/tree.h"

namespace cpmcu {
namespace {

// Maximum number of chains: each shape needs a CUDA graph and trial steps.
constexpr int kMostChains = 5;

// Depths of chains: all, or if there are many, those that grow by about a constant factor.
std::set<int> depths_up_to(int depth) {
  std::set<int> depths;
  for (int i = 0; i < kMostChains; ++i) {
    const double exponent = static_cast<double>(i) / (kMostChains - 1);
    depths.insert(depth <= kMostChains
                      ? std::min(i + 1, depth)
                      : static_cast<int>(std::nearbyint(std::pow(depth, exponent))));
  }
  if (depth > 1) depths.insert(2);
  return depths;
}

}  // namespace

std::vector<DraftShape> smaller_shapes(const DraftShape& largest,
                                       const std::function<int(int depth)>& most_nodes) {
  std::set<DraftShape> found;
  const auto add = [&](int depth, int nodes) {
    const DraftShape shape{depth, std::min(nodes, most_nodes(depth))};
    if (depth <= largest.depth && shape.tree_size < largest.tree_size) found.insert(shape);
  };
  for (int depth : depths_up_to(largest.depth)) add(depth, depth + 1);
  add(2, 8);
  add(largest.depth, 2 * largest.depth);
  add(largest.depth, 4 * largest.depth);
  std::vector<DraftShape> shapes(found.begin(), found.end());
  shapes.push_back(largest);
  return shapes;
}

std::vector<DraftShape> chain_shapes(const DraftShape& largest) {
  return smaller_shapes(largest, [](int depth) { return depth + 1; });
}

std::vector<DraftShape> beam_shapes(const DraftShape& largest, int topk) {
  return smaller_shapes(largest, [=](int depth) { return 1 + num_candidates(topk, depth); });
}

}  // namespace cpmcu
