// int4_pack: the 4-bit tensors of checkpoints to weight blocks.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

// Layouts of checkpoints. G: groups of scales along K (1: channel-wise). Nibble i of a word is its
// bits [4i, 4i + 4).
enum class Int4Format : int {
  kGptq,  // qweight [K/8, N]: nibble i is k = 8 row + i; scales [G, N]; qzeros [G, N/8] hold z - 1
  kGptqV2,      // the same, qzeros hold z
  kAwq,         // qweight [K, N/8]: nibble i is n = 8 column + {0, 2, 4, 6, 1, 3, 5, 7}[i]; qzeros
                // [G, N/8] likewise; scales [G, N]
  kCompressed,  // weight_packed [N, K/8]: nibble i is k = 8 column + i and holds w + 8;
                // weight_scale [N, G]; zero points [N/8, G]: nibble i is n = 8 row + i and holds
                // z + 8
  kMarlin,      // tiles of 16 k x 64 n [K/16, 2N]; scales [G, N], permuted; channel-wise scales
                // (G = 1, K > 128) have another permutation (docs/kernels/int4_files.md)
};

// Packs a part of W, rows [first_row, first_row + n) and k [first_k, first_k + k), from a
// checkpoint's tensors. Rows count in the checkpoint's order. The part that reaches row N (or K)
// also fills the padding beyond.
struct Int4PackParams {
  PackedWeight w;
  Int4Format format = Int4Format::kGptq;
  Tensor q;       // int32; the format gives the shape
  Tensor scales;  // dtype scale_dtype of the layout; the format gives the shape
  Tensor zeros;   // int32; the format gives the shape; empty if W has no zero points
  int64_t first_row = 0;
  int64_t first_k = 0;
  int64_t n = 0;
  int64_t k = 0;  // first_k and k are multiples of 128; but if the part reaches K, k is any number
  // The group size of the tensors, unless scales are channel-wise: 128, or a multiple of the group
  // size of W's blocks.
  int64_t k_per_scale = kPackedK;
};

inline void check_int4_part(const char* name, const Tensor& tensor, DType dtype, int64_t rows,
                            int64_t columns) {
  CHECK(tensor.num_dims() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
            tensor.dtype() == dtype,
        "int4_pack: {} is {} {}, expected {} [{}, {}]", name, name_of(tensor.dtype()),
        tensor.shape_text(), name_of(dtype), rows, columns);
}

inline void check_int4_pack(const Int4PackParams& p) {
  check_packed_weight(p.w);
  CHECK(p.w.layout.codes == Codes::kInt4 && p.w.layout.planes == 1 && p.n > 0 && p.k > 0 &&
            p.first_row >= 0 && p.first_k >= 0 && p.first_row + p.n <= p.w.n &&
            p.first_k + p.k <= p.w.k,
        "int4_pack: rows {} + {} and k {} + {} are no part of a W [{}, {}] of int4 with one plane",
        p.first_row, p.n, p.first_k, p.k, p.w.n, p.w.k);
  CHECK(p.first_k % kPackedK == 0 && (p.k % kPackedK == 0 || p.first_k + p.k == p.w.k),
        "int4_pack: a part has k {} + {}, expected multiples of {} or the end of {}", p.first_k,
        p.k, kPackedK, p.w.k);
  const bool by_row = p.format == Int4Format::kCompressed, tiled = p.format == Int4Format::kMarlin;
  const int64_t n_factor = by_row ? 1 : tiled ? 64 : 8, k_factor = by_row ? 1 : tiled ? 16 : 8;
  CHECK(p.n % n_factor == 0 && p.k % k_factor == 0,
        "int4_pack: a part is [{}, {}], expected multiples of {} and {}", p.n, p.k, n_factor,
        k_factor);
  CHECK(p.w.layout.zero_points == !p.zeros.empty() && !(tiled && p.w.layout.zero_points),
        "int4_pack: zero points are {}, W has {}, and a Marlin file has none",
        p.zeros.empty() ? "missing" : "given", p.w.layout.zero_points ? "some" : "none");
  const bool fits = p.w.layout.group == 0
                        ? p.k_per_scale == kPackedK
                        : p.k_per_scale > 0 && p.k_per_scale % p.w.layout.group == 0;
  CHECK(fits && (!tiled || p.w.layout.group == 0),
        "int4_pack: a scale has {} k, and one of W has {}; expected 128, or a multiple of "
        "W's groups if the file has no Marlin tiles",
        p.k_per_scale, p.w.layout.group == 0 ? kPackedK : p.w.layout.group);
  const int64_t all = (p.k + p.k_per_scale - 1) / p.k_per_scale;
  const int64_t groups = p.scales.num_dims() == 2 && p.scales.size(by_row ? 1 : 0) == 1 ? 1 : all;
  const int64_t eighths = (p.n + 7) / 8;
  if (by_row) {
    check_int4_part("q", p.q, DType::kI32, p.n, (p.k + 7) / 8);
    check_int4_part("scales", p.scales, p.w.layout.scale_dtype, p.n, groups);
    if (p.w.layout.zero_points) check_int4_part("zeros", p.zeros, DType::kI32, eighths, groups);
    return;
  }
  if (tiled) {
    check_int4_part("q", p.q, DType::kI32, p.k / 16, 2 * p.n);
  } else if (p.format == Int4Format::kAwq) {
    check_int4_part("q", p.q, DType::kI32, p.k, eighths);
  } else {
    check_int4_part("q", p.q, DType::kI32, p.k / 8, p.n);
  }
  check_int4_part("scales", p.scales, p.w.layout.scale_dtype, groups, p.n);
  if (p.w.layout.zero_points) check_int4_part("zeros", p.zeros, DType::kI32, groups, eighths);
}

REGISTER_OP(int4_pack, Int4PackParams)

}  // namespace cpmcu
