// A short causal convolution over the rows of a draft block, with weights of each row (DFlash2).
//
//   y[j, c] = sum_{t < width} (base[t, c] + delta[j, first + t * H / group + c / group]) * x[j - t,
//   c]
//
// Rows of a sequence are contiguous; j counts within its block of `num_rows` rows, and x[j - t] is
// 0 for t > j. Sums are in float32 and rounded once.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct BlockConvParams {
  Tensor out;    // [T, H], T a multiple of num_rows; another buffer than x
  Tensor x;      // [T, H]
  Tensor base;   // [width, H] same dtype as x
  Tensor delta;  // [T, columns] same dtype as x
  int first = 0;
  int group = 0;      // divides H
  int num_rows = 0;   // of a block, at least width
  bool adds = false;  // out += y
};
REGISTER_OP(block_conv, BlockConvParams)

}  // namespace cpmcu
