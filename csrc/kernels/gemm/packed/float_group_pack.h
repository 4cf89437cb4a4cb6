// float_group_pack: rows of float codes with a scale for each group of k to weight blocks (NVFP4,
// MXFP4, MXFP8).
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

// Packs rows [first_row, first_row + n) of W. The part that reaches row N also fills the padding
// beyond.
struct FloatGroupPackParams {
  PackedWeight w;  // its layout has group scales
  // [n, K] of 1 byte. With e2m1, uint8 [n, K / 2]: the low nibble is the even k.
  Tensor codes;
  Tensor scales;             // [n, K / group] of 1 byte: e4m3, or powers of two (e8m0)
  bool powers = false;       // scales are powers of two (e8m0)
  Tensor factor{};           // float32, one number that multiplies all scales of the part; empty: 1
  bool divides = false;      // the factor divides the scales
  int64_t first_row = 0;     // number in the checkpoint's order; a multiple of 8
  bool interleaved = false;  // W is gated, and the part alternates a row of gate and a row of up
};

inline void check_float_group_pack(const FloatGroupPackParams& p) {
  check_packed_weight(p.w);
  const PackedLayout& layout = p.w.layout;
  CHECK(layout.group > 0 && p.w.k % layout.group == 0,
        "float_group_pack: a W of {} k has scales for {} k, expected whole groups", p.w.k,
        layout.group);
  const int64_t n = p.codes.num_dims() == 2 ? p.codes.size(0) : 0;
  CHECK(n > 0 && n % 8 == 0 && p.first_row % 8 == 0 && p.first_row >= 0 &&
            p.first_row + n <= p.w.n && p.codes.size(1) == p.w.k * layout.bits() / 8 &&
            size_of(p.codes.dtype()) == 1,
        "float_group_pack: codes {} {} from row {} are no part of a W [{}, {}] of {} bits; rows "
        "are packed by eight",
        name_of(p.codes.dtype()), p.codes.shape_text(), p.first_row, p.w.n, p.w.k, layout.bits());
  CHECK(p.scales.num_dims() == 2 && p.scales.size(0) == n &&
            p.scales.size(1) == p.w.k / layout.group && size_of(p.scales.dtype()) == 1,
        "float_group_pack: scales are {} {}, expected bytes [{}, {}]", name_of(p.scales.dtype()),
        p.scales.shape_text(), n, p.w.k / layout.group);
  CHECK(p.factor.empty() || (p.factor.dtype() == DType::kF32 && p.factor.num_elements() == 1),
        "float_group_pack: the factor is {} {}, expected one number in float32",
        name_of(p.factor.dtype()), p.factor.shape_text());
  CHECK(!p.interleaved || (p.w.gated && n == p.w.n),
        "float_group_pack: {} interleaved rows, expected all {} of a gated W", n, p.w.n);
}

REGISTER_OP(float_group_pack, FloatGroupPackParams)

}  // namespace cpmcu
