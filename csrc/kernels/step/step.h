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
  const int* ids = nullptr;  // [T] on the device
  // The tokens are nodes of token trees. Results must have the bits of plain decoding.
  bool verify = false;
  StepTokens tokens;
  Accepted accepted{};  // of each slot's last step; empty for a draft's own steps
};

// Upper bounds that size buffers.
struct StepLimits {
  int max_tokens = 0;          // of a step: T
  int max_decode_tokens = 0;   // of a decode step
  int max_tree_size = 1;       // of one sequence in a decode step
  int max_kv = 0;              // tokens of a sequence, those of a step in flight included
  int compute_capability = 0;  // as in Context

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
