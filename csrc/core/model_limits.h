// What the numbers of a ModelSpec may be. Python reads configs without the extension, so it has a
// copy: `make stubs` writes cpmcu/models/limits.py from this table.
#pragma once

#include "core/model_spec.h"

namespace cpmcu {

struct FieldLimit {
  const char* name;
  int ModelSpec::* field;
  int least, most;
  int multiple = 1;
};

// Rows are read in pieces of 16 bytes, 8 numbers of 2 bytes.
inline constexpr FieldLimit kModelLimits[] = {
    {"vocab_size", &ModelSpec::vocab_size, 1, 1 << 24},
    {"hidden_size", &ModelSpec::hidden_size, 8, 16384, 8},
    {"intermediate_size", &ModelSpec::intermediate_size, 8, 1 << 20, 8},
    {"num_hidden_layers", &ModelSpec::num_hidden_layers, 1, 1024},
    {"num_attention_heads", &ModelSpec::num_attention_heads, 1, 1024},
    {"head_dim", &ModelSpec::head_dim, 8, 256, 8},
    {"max_position_embeddings", &ModelSpec::max_position_embeddings, 1, 1 << 26},
};
inline constexpr int kCudaHeadDims[] = {64, 128, 256};

}  // namespace cpmcu
