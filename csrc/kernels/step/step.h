// One forward step as the layers see it.
#pragma once

#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

// Selects the kernels of a step. The bits of a token's results depend on the phase, never on the
// number of tokens.
enum class Phase { kPrefill, kDecode };

struct Step {
  Phase phase = Phase::kDecode;
  const int* ids = nullptr;  // [T] in device memory
  // The tokens are nodes of token trees. Results must have the bits of plain decoding.
  bool verify = false;
  StepTokens tokens;
  // The step has no draft, and its acceptance follows in any case. So its token becomes part of
  // each sequence that has not ended, and a block may commit it at once.
  bool accepts_all = false;
  Accepted accepted{};  // the tokens of each slot's last step; empty for the draft's own steps
};

// Upper bounds that size buffers.
struct StepLimits {
  int max_tokens = 0;         // maximum number of tokens of a step, T
  int max_decode_tokens = 0;  // maximum number of tokens of a decode step
  int max_tree_size = 1;      // maximum number of tree nodes of one sequence in a decode step
  int max_kv = 0;  // maximum number of tokens of a sequence, those of a step in flight included
  int compute_capability = 0;  // the same as Context::compute_capability

  // False: buffers that only GPU kernels use are not planned.
  bool is_cuda() const { return compute_capability > 0; }
};

// Points in time of a forward step. They give the lifetimes of scratch memory (core/arena.h).
// A block uses four consecutive points: norm, in, core, out. kLoad is the loading of weights,
// before the first step; its scratch is never alive together with scratch of a step.
enum Timeline : int {
  kEmbed = 0,
  kMixer = 1,
  kMlp = 5,
  kFinalNorm = 9,
  kHead = 10,
  kSample = 11,
  kLoad = 12,
};

}  // namespace cpmcu
