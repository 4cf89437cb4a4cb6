// A short causal convolution over the rows of a draft block, with weights of each row (DFlash2).
//
//   y[j, c] = sum_{t < width} w[j, t, c] * x[j - t, c]
//   w[j, t, c] = base[t, c] + delta[j, first + t * H / group + c / group]
//
// A block has `num_rows` contiguous rows, and j is the row within its block. If t > j, x[j - t] is
// 0. Sums are in float32 and rounded once.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct BlockConvParams {
  Tensor out;    // [T, H], T a multiple of num_rows; another buffer than x
  Tensor x;      // [T, H]
  Tensor base;   // [width, H] same dtype as x
  Tensor delta;  // [T, columns] same dtype as x
  int first = 0;
  int group = 0;      // columns that share a number of delta; divides H
  int num_rows = 0;   // number of rows of a block, at least width
  bool adds = false;  // adds y to out, instead of overwriting out
};

inline void check_block_conv(const BlockConvParams& p) {
  const int64_t rows = p.x.size(0), width = p.base.size(0), columns = p.x.size(1);
  const DType dtype = p.x.dtype();
  CHECK(
      p.out.size(0) == rows && p.out.size(1) == columns && p.base.size(1) == columns &&
          p.delta.size(0) == rows && p.out.dtype() == dtype && p.base.dtype() == dtype &&
          p.delta.dtype() == dtype,
      "block_conv: out is {} {}, x {} {}, base {} {} and delta {} {}, expected one dtype, and rows "
      "and columns of x",
      name_of(p.out.dtype()), p.out.shape_text(), name_of(dtype), p.x.shape_text(),
      name_of(p.base.dtype()), p.base.shape_text(), name_of(p.delta.dtype()), p.delta.shape_text());
  CHECK(
      p.group >= 1 && columns % p.group == 0 && p.first >= 0 &&
          p.first + width * (columns / p.group) <= p.delta.size(1),
      "block_conv: groups of {} from column {} on, expected a divisor of {} and at most {} columns",
      p.group, p.first, columns, p.delta.size(1));
  CHECK(
      width >= 1 && p.num_rows >= width && rows % p.num_rows == 0,
      "block_conv: {} rows in blocks of {} and {} weights a channel, expected whole blocks and at "
      "most as many weights as rows of a block",
      rows, p.num_rows, width);
  CHECK(p.out.data() != p.x.data(), "block_conv: out is x, expected another buffer");
}
REGISTER_OP(block_conv, BlockConvParams)

}  // namespace cpmcu
