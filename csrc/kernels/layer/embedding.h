// out[t] = table[ids[t]] * scale
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct EmbeddingParams {
  Tensor out;                // [T, H]
  Tensor table;              // [V, H], same dtype
  const int* ids = nullptr;  // [T] on the device; an id outside [0, V) reads row 0
  float scale = 1;
  int64_t out_stride = 0;  // elements from one row of out to the next; 0: H
};

REGISTER_OP(embedding, EmbeddingParams)

}  // namespace cpmcu
