// code8_pack: rows of 8-bit codes with float32 scales to weight blocks (Codes::kE4m3).
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

// Packs rows [first_row, first_row + n) of W. The part that reaches row N also fills the padding
// beyond. Scale [i, j] belongs to `rows_per_scale` rows of the part and `k_per_scale` k.
struct Code8PackParams {
  PackedWeight w;
  Tensor codes;   // [n, K], 1 byte each
  Tensor scales;  // [ceil(n / rows_per_scale), ceil(K / k_per_scale)] float32
  // In the checkpoint's order; a multiple of 8 if 8 rows of W share a scale.
  int64_t first_row = 0;
  // Rows that share a scale in the file. A multiple of 8, or at least n, if 8 rows of W share a
  // scale.
  int64_t rows_per_scale = 1;
  // Inputs that share a scale in the file: a multiple of 128, or at least K.
  int64_t k_per_scale = kPackedK;
};

inline void check_code8_pack(const Code8PackParams& p) {
  check_packed_weight(p.w);
  const int64_t n = p.codes.num_dims() == 2 ? p.codes.size(0) : 0, k = p.w.k;
  CHECK(p.w.layout.codes == Codes::kE4m3 && p.w.layout.group == 0 && n > 0 &&
            p.codes.size(1) == k && size_of(p.codes.dtype()) == 1 && p.first_row >= 0 &&
            p.first_row + n <= p.w.n,
        "code8_pack: codes {} {} from row {} are no part of an 8-bit W [{}, {}]",
        name_of(p.codes.dtype()), p.codes.shape_text(), p.first_row, p.w.n, k);
  const int shared = p.w.layout.scale_rows;
  CHECK(p.rows_per_scale > 0 && p.first_row % shared == 0 &&
            (p.rows_per_scale % shared == 0 || p.rows_per_scale >= n) &&
            (p.k_per_scale % kPackedK == 0 || p.k_per_scale >= k) && p.k_per_scale > 0,
        "code8_pack: a scale for {} rows and {} k, from row {} of a W that has one for {} rows",
        p.rows_per_scale, p.k_per_scale, p.first_row, shared);
  CHECK(p.scales.num_dims() == 2 && p.scales.dtype() == DType::kF32 &&
            p.scales.size(0) == (n + p.rows_per_scale - 1) / p.rows_per_scale &&
            p.scales.size(1) == (k + p.k_per_scale - 1) / p.k_per_scale,
        "code8_pack: scales are {} {}, expected float32, one for {} rows and {} k of [{}, {}]",
        name_of(p.scales.dtype()), p.scales.shape_text(), p.rows_per_scale, p.k_per_scale, n, k);
}

REGISTER_OP(code8_pack, Code8PackParams)

}  // namespace cpmcu
