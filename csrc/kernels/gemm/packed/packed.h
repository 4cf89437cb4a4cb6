// 4-bit weights with 16-bit activations: the packed layout, and y = alpha * x W^T + beta * y.
//
// W [N, K] is stored as weight blocks of 256 rows x 128 k, [ceil(N / 256)][ceil(K / 128)]. A weight
// block is contiguous, so one bulk copy brings all that its multiplication needs:
//   16384 bytes  q, 4 bits each, in the order of mma fragments (nibble_place)
//     512 bytes  scales [256], float16 or bfloat16: one for the 128 k of a row
//     256 bytes  zero points [256], uint8; only if W has zero points
// w = (q - z) * scale; z = 8 if there are no zero points. Rows beyond N and k beyond K have scale 0
// and q = z = 8. Channel-wise scales are repeated in every weight block.
//
// An 8-bit W has two nibble planes (`nibble_planes` 2). It is stored as a matrix [N, 2K]: the first
// K columns hold the high nibbles with 16 times the scale, the others the low nibbles. The kernel
// reads x twice. w = (16 (h - 8) + (l - 8)) * scale covers [-136, 119].
//
// A gated W stacks the gate and up projections of an MLP, N / 2 rows each. It is stored
// interleaved: eight rows of gate, eight rows of up. So one thread has both sums of an output, and
// y [M, N / 2] = silu(x gate^T) * x up^T.
//
// `packed_gemm`: the order of additions depends on N and K only, so a row's bits do not depend on
// the number of rows. More than 64 rows have a kernel of their own on Hopper; elsewhere they go in
// blocks of 64 rows.
#pragma once

#include <algorithm>

#include "kernels/gemm/gemm.h"

namespace cpmcu {

constexpr int kPackedRows = 256;
constexpr int kPackedK = 128;

struct PackedWeight {
  void* blocks = nullptr;
  int64_t n = 0;
  int64_t k = 0;
  int nibble_planes = 1;
  bool zero_points = false;
  DType scale_dtype = DType::kF16;  // or kBF16
  bool gated = false;

  int64_t out_features() const { return gated ? n / 2 : n; }
  int64_t block_bytes() const { return 16384 + 512 + (zero_points ? 256 : 0); }
  int64_t row_blocks() const { return (n + kPackedRows - 1) / kPackedRows; }
  int64_t k_blocks() const { return nibble_planes * ((k + kPackedK - 1) / kPackedK); }
  int64_t num_bytes() const { return row_blocks() * k_blocks() * block_bytes(); }
  // Slices of K in the CUDA kernel, used if there are too few row blocks to fill a large chip. The
  // limits are the clusters of each size that fit an H100, whose clusters lie within groups of 10
  // to 18 SMs. The slices are part of the order of additions, so they depend on nothing else.
  int slices() const {
    constexpr int kClusters[] = {0, 132, 66, 42, 30, 22, 16, 14, 14};
    for (int slices = 8; slices > 1; --slices) {
      if (slices <= k_blocks() && row_blocks() <= kClusters[slices]) return slices;
    }
    return 1;
  }
};

// The place of q of (row, k) in a weight block: bits [shift, shift + 4) of the little-endian 32-bit
// word `word`. A warp owns 32 rows. The 16 bytes of a lane are the A fragments of mma.m16n8k16 of
// two m16 tiles and two k steps of 16.
struct NibblePlace {
  int word;
  int shift;
};
constexpr NibblePlace nibble_place(int row, int k) {
  const int warp = row / 32, tile = row / 16 % 2, row_half = row / 8 % 2, g = row % 8;
  const int step = k / 16, k_half = k / 8 % 2, q = k / 2 % 4, odd = k % 2;
  const int lane = 4 * g + q, reg = row_half + 2 * k_half;
  return {512 * warp + 128 * (step / 2) + 4 * lane + 2 * (step % 2) + tile, 4 * (reg + 4 * odd)};
}

// The row of a checkpoint's stacked gate and up (N rows) that is stored as row `row`.
constexpr int64_t gated_row(int64_t n, int64_t row) {
  return row < n ? row / 8 % 2 * (n / 2) + row / 16 * 8 + row % 8 : row;
}

// Layouts of checkpoints. G: groups of scales along K (1: channel-wise). Nibble i of a word is its
// bits [4i, 4i + 4).
enum class Int4Format : int {
  kGptq,  // qweight [K/8, N]: nibble i is k = 8 row + i; scales [G, N]; qzeros [G, N/8] hold z - 1
  kGptqV2,      // the same, qzeros hold z
  kAwq,         // qweight [K, N/8]: nibble i is n = 8 column + {0, 2, 4, 6, 1, 3, 5, 7}[i]; qzeros
                // [G, N/8] likewise; scales [G, N]
  kCompressed,  // weight_packed [N, K/8]: nibble i is k = 8 column + i, holding w + 8;
                // weight_scale [N, G]; zero points [N/8, G]: nibble i is n = 8 row + i, holds z + 8
  kMarlin,      // tiles of 16 k x 64 n [K/16, 2N]; scales [G, N], permuted; channel-wise scales
                // (G = 1, K > 128) have another permutation (docs/kernels/int4_files.md)
};

// Packs a part of W, rows [first_row, first_row + n) and k [first_k, first_k + k), from a
// checkpoint's tensors. Rows count in the checkpoint's order. The part that reaches row N (or K)
// also fills the padding beyond.
struct Int4PackParams {
  PackedWeight w;
  Int4Format format = Int4Format::kGptq;
  Tensor q;       // int32, shape by format
  Tensor scales;  // w.scale_dtype
  Tensor zeros;   // int32; empty if W has no zero points
  int64_t first_row = 0;
  int64_t first_k = 0;
  int64_t n = 0;
  int64_t k = 0;  // first_k and k are multiples of 128 unless the part reaches K
};

// Quantises dense rows to 15 levels (two nibble planes: 239), with one scale for 128 k of a row:
// the largest magnitude / 7 (/ 119). w has no zero points. If there is an index, row i of W is row
// index[i] of x.
struct PackedQuantizeParams {
  PackedWeight w;
  Tensor x;                    // [rows, K] float16, bfloat16 (or float32 on the CPU)
  const int* index = nullptr;  // [N] on the device
};

// Dequantises rows [first_row, first_row + out.size(0)) of W in stored order: (q - z) * scale,
// rounded once.
struct PackedDequantizeParams {
  Tensor out;  // [n, K]
  PackedWeight w;
  int64_t first_row = 0;
};

struct PackedGemmParams {
  Tensor y;  // [M, N] (gated: [M, N / 2]), dtype of x, or float32
  Tensor x;  // [M, K], K a multiple of 8
  PackedWeight w;
  float alpha = 1;   // 1 if gated
  float beta = 0;    // 0: y is not read; 0 if gated
  Tensor scratch{};  // [packed_scratch_floats] float32; compute capability below 9.0 or from 12.0
};

inline int64_t packed_scratch_floats(const PackedWeight& w, int64_t max_rows) {
  return w.slices() == 1 ? 0 : w.slices() * w.n * std::min<int64_t>(max_rows, kMaxSkinnyRows);
}

inline void check_packed_weight(const PackedWeight& w) {
  CHECK(w.blocks != nullptr && w.n > 0 && w.k > 0 && (w.nibble_planes == 1 || w.nibble_planes == 2),
        "a 4-bit W is [{}, {}] of {} nibble planes, expected memory, a size, and 1 or 2 planes",
        w.n, w.k, w.nibble_planes);
  CHECK(w.scale_dtype == DType::kF16 || w.scale_dtype == DType::kBF16,
        "the scales of a 4-bit W are {}, expected float16 or bfloat16", name_of(w.scale_dtype));
  CHECK(w.nibble_planes == 1 || !w.zero_points,
        "a 4-bit W of two nibble planes has zero points, expected none");
  CHECK(!w.gated || w.n % 16 == 0, "a gated 4-bit W has {} rows, expected a multiple of 16", w.n);
}

inline void check_packed_gemm(const PackedGemmParams& p) {
  check_packed_weight(p.w);
  CHECK(p.x.num_dims() == 2 && p.y.num_dims() == 2 && p.x.size(1) == p.w.k &&
            p.y.size(0) == p.x.size(0) && p.y.size(1) == p.w.out_features(),
        "packed_gemm: y {} = x {} times a 4-bit W [{}, {}]^T does not fit", p.y.shape_text(),
        p.x.shape_text(), p.w.n, p.w.k);
  CHECK(p.w.k % 8 == 0, "packed_gemm: K is {}, expected a multiple of 8", p.w.k);
  CHECK(!p.w.gated || (p.alpha == 1 && p.beta == 0),
        "packed_gemm: alpha {} and beta {} of a gated W, expected 1 and 0", p.alpha, p.beta);
  CHECK(is_floating(p.x.dtype()) && (p.y.dtype() == p.x.dtype() || p.y.dtype() == DType::kF32),
        "packed_gemm: y is {} and x {}; expected one floating dtype, y may be float32",
        name_of(p.y.dtype()), name_of(p.x.dtype()));
}

inline void check_int4_part(const char* name, const Tensor& tensor, DType dtype, int64_t rows,
                            int64_t columns) {
  CHECK(tensor.num_dims() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
            tensor.dtype() == dtype,
        "int4_pack: {} is {} {}, expected {} [{}, {}]", name, name_of(tensor.dtype()),
        tensor.shape_text(), name_of(dtype), rows, columns);
}

inline void check_int4_pack(const Int4PackParams& p) {
  check_packed_weight(p.w);
  CHECK(p.w.nibble_planes == 1 && p.n > 0 && p.k > 0 && p.first_row >= 0 && p.first_k >= 0 &&
            p.first_row + p.n <= p.w.n && p.first_k + p.k <= p.w.k,
        "int4_pack: rows {} + {} and k {} + {} are no part of a W [{}, {}] of one nibble plane",
        p.first_row, p.n, p.first_k, p.k, p.w.n, p.w.k);
  CHECK(p.first_k % kPackedK == 0 && (p.k % kPackedK == 0 || p.first_k + p.k == p.w.k),
        "int4_pack: a part has k {} + {}, expected multiples of {} or the end of {}", p.first_k,
        p.k, kPackedK, p.w.k);
  const bool by_row = p.format == Int4Format::kCompressed, tiled = p.format == Int4Format::kMarlin;
  const int64_t n_factor = by_row ? 1 : tiled ? 64 : 8, k_factor = by_row ? 1 : tiled ? 16 : 8;
  CHECK(p.n % n_factor == 0 && p.k % k_factor == 0,
        "int4_pack: a part is [{}, {}], expected multiples of {} and {}", p.n, p.k, n_factor,
        k_factor);
  CHECK(p.w.zero_points == !p.zeros.empty() && !(tiled && p.w.zero_points),
        "int4_pack: zero points are {}, W has {}, and a Marlin file has none",
        p.zeros.empty() ? "missing" : "given", p.w.zero_points ? "some" : "none");
  const int64_t all = (p.k + kPackedK - 1) / kPackedK;
  const int64_t groups = p.scales.num_dims() == 2 && p.scales.size(by_row ? 1 : 0) == 1 ? 1 : all;
  const int64_t eighths = (p.n + 7) / 8;
  if (by_row) {
    check_int4_part("q", p.q, DType::kI32, p.n, (p.k + 7) / 8);
    check_int4_part("scales", p.scales, p.w.scale_dtype, p.n, groups);
    if (p.w.zero_points) check_int4_part("zeros", p.zeros, DType::kI32, eighths, groups);
    return;
  }
  if (tiled) {
    check_int4_part("q", p.q, DType::kI32, p.k / 16, 2 * p.n);
  } else if (p.format == Int4Format::kAwq) {
    check_int4_part("q", p.q, DType::kI32, p.k, eighths);
  } else {
    check_int4_part("q", p.q, DType::kI32, p.k / 8, p.n);
  }
  check_int4_part("scales", p.scales, p.w.scale_dtype, groups, p.n);
  if (p.w.zero_points) check_int4_part("zeros", p.zeros, DType::kI32, groups, eighths);
}

inline void check_packed_quantize(const PackedQuantizeParams& p) {
  check_packed_weight(p.w);
  CHECK(!p.w.zero_points && !p.w.gated,
        "packed_quantize: W has zero points or is gated, expected neither");
  CHECK(p.x.num_dims() == 2 && p.x.size(1) == p.w.k &&
            (p.index != nullptr || p.x.size(0) == p.w.n) && is_floating(p.x.dtype()),
        "packed_quantize: x is {} {}, expected floating rows of {} for a W [{}, {}]",
        name_of(p.x.dtype()), p.x.shape_text(), p.w.k, p.w.n, p.w.k);
}

inline void check_packed_dequantize(const PackedDequantizeParams& p) {
  check_packed_weight(p.w);
  CHECK(p.out.num_dims() == 2 && p.out.size(1) == p.w.k && p.first_row >= 0 &&
            p.first_row + p.out.size(0) <= p.w.n && is_floating(p.out.dtype()),
        "packed_dequantize: out is {} {} from row {}, expected floating rows of a W [{}, {}]",
        name_of(p.out.dtype()), p.out.shape_text(), p.first_row, p.w.n, p.w.k);
}

REGISTER_OP(int4_pack, Int4PackParams)
REGISTER_OP(packed_quantize, PackedQuantizeParams)
REGISTER_OP(packed_dequantize, PackedDequantizeParams)
REGISTER_OP(packed_gemm, PackedGemmParams)

}  // namespace cpmcu
