// int8_pack: the 8-bit integers of checkpoints to weight blocks (Codes::kInt8).
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

// Packs rows [first_row, first_row + n) of W. The part that reaches row N also fills the padding
// beyond.
struct Int8PackParams {
  PackedWeight w;
  // The dtype tells the form. uint8 [n, K] holds q. int8 [n, K] holds q - 128. int32 [K / 4, n]
  // holds q: byte i of a word is k = 4 row + i.
  Tensor codes;
  Tensor scales;  // dtype scale_dtype of the layout; [n or 1, G], or [G, n] if codes are int32
  // If W has zero points, int32 words of four bytes. If the codes are int32, they are [G, n / 4]
  // and byte i is n = 4 column + i. Otherwise they are [n / 4, G] and byte i is n = 4 row + i.
  Tensor zeros{};
  int zero_offset = 0;    // number that is added to the bytes, modulo 256
  int64_t first_row = 0;  // number in the checkpoint's order; a multiple of 8
  // Inputs that share a scale in the file: a multiple of 32, or at least K.
  int64_t k_per_scale = 0;
};

inline void check_int8_pack(const Int8PackParams& p) {
  check_packed_weight(p.w);
  const bool words = p.codes.dtype() == DType::kI32;
  CHECK(p.codes.num_dims() == 2 &&
            (words || p.codes.dtype() == DType::kU8 || p.codes.dtype() == DType::kI8),
        "int8_pack: codes are {} {}, expected uint8 or int8 [n, K], or int32 [K / 4, n]",
        name_of(p.codes.dtype()), p.codes.shape_text());
  const int64_t n = p.codes.size(words ? 1 : 0), k = p.codes.size(words ? 0 : 1) * (words ? 4 : 1);
  CHECK(p.w.layout.codes == Codes::kInt8 && k == p.w.k && n % 8 == 0 && p.first_row % 8 == 0 &&
            p.first_row >= 0 && p.first_row + n <= p.w.n,
        "int8_pack: codes [{}, {}] from row {} are no part of an 8-bit W [{}, {}]; rows are packed "
        "by eight",
        n, k, p.first_row, p.w.n, p.w.k);
  CHECK(p.k_per_scale > 0 && (p.k_per_scale % p.w.layout.group == 0 || p.k_per_scale >= k),
        "int8_pack: a scale has {} k, expected a multiple of {}, or all", p.k_per_scale,
        p.w.layout.group);
  const int64_t groups = (k + p.k_per_scale - 1) / p.k_per_scale;
  const bool fits = p.scales.num_dims() == 2 && p.scales.size(words ? 0 : 1) == groups &&
                    (p.scales.size(words ? 1 : 0) == n || (!words && p.scales.size(0) == 1));
  CHECK(fits && p.scales.dtype() == p.w.layout.scale_dtype,
        "int8_pack: scales are {} {}, expected {}, one for {} k of [{}, {}]",
        name_of(p.scales.dtype()), p.scales.shape_text(), name_of(p.w.layout.scale_dtype),
        p.k_per_scale, n, k);
  const Tensor& zeros = p.zeros;
  CHECK(zeros.empty() == !p.w.layout.zero_points &&
            (zeros.empty() ||
             (zeros.num_dims() == 2 && zeros.dtype() == DType::kI32 &&
              zeros.size(words ? 0 : 1) == groups && zeros.size(words ? 1 : 0) == n / 4)),
        "int8_pack: zero points are {} {}, and W has {}; expected int32 words, four of [{}, {}]",
        name_of(zeros.dtype()), zeros.shape_text(), p.w.layout.zero_points ? "some" : "none", n,
        groups);
}

REGISTER_OP(int8_pack, Int8PackParams)

}  // namespace cpmcu
