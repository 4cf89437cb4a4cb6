// The tokens that a step accepted, in device memory.
#pragma once

namespace cpmcu {

// The tokens that the last step accepted in each slot. A drafter reads them to process the accepted
// tokens; a block reads them to commit its state.
//
//   after                          counts  ids[j]             paths[j]
//   a decode step, n tokens        n       j-th token         tree node that drew the token
//   a prefill that drew a token    1       ids[0]: the token  -1: a prefill has no tree
//
// Unused elements of paths are -1.
struct Accepted {
  int max_path = 0;       // D + 1: tokens of the longest accepted path, the root included
  int* ids = nullptr;     // [slots, max_path]
  int* paths = nullptr;   // [slots, max_path]
  int* counts = nullptr;  // [slots]

  // The row of the accepted hidden states [slots * max_path, ...] that belongs to the token at
  // `position`. They are those of the last max_path tokens of each slot.
  constexpr int hidden_row(int slot, int position) const {
    return slot * max_path + position % max_path;
  }
};

}  // namespace cpmcu
