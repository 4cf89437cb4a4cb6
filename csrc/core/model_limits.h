// The valid ranges of the numbers of a ModelSpec. Python reads configs without the extension, so
// `make stubs` writes a copy of this table to cpmcu/models/limits.py.
#pragma once

#include "core/model_spec.h"

namespace cpmcu {

struct FieldLimit {
  const char* name;
  int ModelSpec::* field;
  int least, most;
  int multiple = 1;
};

// The multiples are 8, because kernels read rows in 16-byte vectors of 8 numbers.
inline constexpr FieldLimit kModelLimits[] = {
    {"vocab_size", &ModelSpec::vocab_size, 1, 1 << 24},
    {"hidden_size", &ModelSpec::hidden_size, 8, 16384, 8},
    {"intermediate_size", &ModelSpec::intermediate_size, 8, 1 << 20, 8},
    {"num_hidden_layers", &ModelSpec::num_hidden_layers, 1, 1024},
    {"num_attention_heads", &ModelSpec::num_attention_heads, 1, 1024},
    {"head_dim", &ModelSpec::head_dim, 8, 512, 8},
    {"max_position_embeddings", &ModelSpec::max_position_embeddings, 1, 1 << 26},
};
inline constexpr int kCudaHeadDims[] = {64, 128, 256, 512};

}  // namespace cpmcu
