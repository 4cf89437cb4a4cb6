// One forward step as the layers see it.
#pragma once

#include "kernels/step/step_tokens.h"

namespace cpmcu {

// Which kernels a step uses. A row's bits depend on the phase, never on the number of rows.
enum class Phase { kPrefill, kDecode };

struct Step {
  Phase phase = Phase::kDecode;
  const int* ids = nullptr;  // [T] on the device
  bool verify = false;       // the rows are token trees whose bits must be those of plain decoding
  StepTokens tokens;
};

// Upper bounds that size buffers.
struct StepLimits {
  int max_tokens = 0;          // of a step: T
  int max_decode_tokens = 0;   // of a decode step
  int max_kv = 0;              // tokens of a sequence, those of a step in flight included
  int compute_capability = 0;  // as in Context

  // Else what only kernels of a GPU use is not planned.
  bool is_cuda() const { return compute_capability > 0; }
};

// Phases of a forward step, for lifetimes of scratch (core/arena.h). A block has four in a row:
// norm, in, core, out. kLoad is before the first step: scratch of loading meets none of the others.
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
