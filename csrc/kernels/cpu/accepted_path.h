// The accepted tokens of a slot's last step, for ops that add them to their state later.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/step/step.h"

namespace cpmcu::cpu {

// The nodes of the slot's accepted path that the state lacks. `folded`: tokens that the state
// holds; `length`: tokens of the sequence; `num_pending`: rows that a step keeps. Empty: nothing to
// add, or the path does not lead from `folded` to `length`.
inline std::span<const int> accepted_path(const Accepted& accepted, int slot, int folded,
                                          int length, int64_t num_pending) {
  if (accepted.counts == nullptr || folded == length) return {};
  const int count = accepted.counts[slot];
  const int* path = accepted.paths + int64_t{slot} * accepted.max_path;
  const bool fits = folded + count == length && std::all_of(path, path + count, [&](int node) {
                      return node >= 0 && node < num_pending;
                    });
  return fits ? std::span(path, static_cast<size_t>(count)) : std::span<const int>();
}

}  // namespace cpmcu::cpu
