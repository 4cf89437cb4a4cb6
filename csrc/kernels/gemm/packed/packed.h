// Quantised weights with 16-bit activations: weight blocks, and y = alpha * x W^T + beta * y.
//
// W [N, K] is stored as weight blocks of 256 rows x 128 k, [ceil(N / 256)][ceil(K / 128)]. A weight
// block is contiguous, so one bulk copy brings all that its multiplication needs: the codes in the
// order of mma fragments, then what PackedLayout lists. Rows beyond N have scale 0.
//
// A W with two planes (`PackedLayout::planes`) is stored as a matrix [N, 2K], and kernels read x
// twice.
//
// A gated W stacks the gate and up projections of an MLP, N / 2 rows each. It is stored
// interleaved: eight rows of gate, eight rows of up. So one thread has both sums of an output, and
// y [M, N / 2] = silu(x gate^T) * x up^T.
//
// `packed_gemm`: the order of additions depends on N and K only, so a row's bits do not depend on
// the number of rows. More than 64 rows have a kernel of their own on Hopper; elsewhere they go in
// blocks of 64 rows. A scale multiplies a float32 sum over the k that share it, at most 128.
#pragma once

#include <algorithm>

#include "kernels/gemm/gemm.h"
#include "kernels/gemm/packed/layout.h"

namespace cpmcu {

struct PackedWeight {
  void* blocks = nullptr;
  int64_t n = 0;
  int64_t k = 0;
  PackedLayout layout{};
  bool gated = false;

  int64_t out_features() const { return gated ? n / 2 : n; }
  int64_t block_bytes() const { return layout.block_bytes(); }
  int64_t row_blocks() const { return (n + kPackedRows - 1) / kPackedRows; }
  int64_t k_blocks() const { return layout.planes * ((k + kPackedK - 1) / kPackedK); }
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

// The row of a checkpoint's stacked gate and up (N rows) that is stored as row `row`.
constexpr int64_t gated_row(int64_t n, int64_t row) {
  return row < n ? row / 8 % 2 * (n / 2) + row / 16 * 8 + row % 8 : row;
}

// The row of a part of W, from `first_row` on, that is row `row` in the checkpoint's order.
// `interleaved`: the part is all of a gated W, and its rows of gate and of up alternate.
constexpr int64_t part_row(int64_t row, int64_t first_row, bool interleaved, int64_t n) {
  return interleaved ? row % (n / 2) * 2 + row / (n / 2) : row - first_row;
}

// Quantises dense rows to 15 levels, or 239 with two planes. The 128 k of a row have one scale: the
// largest magnitude / 7, or / 119 with two planes. w is int4 without zero points. If there is an
// index, row i of W is row index[i] of x. The rows of x for a gated W are those of gate, then those
// of up.
struct PackedQuantizeParams {
  PackedWeight w;
  Tensor x;                    // [rows, K] float16 or bfloat16, on the CPU also float32
  const int* index = nullptr;  // [N] row numbers of x, in device memory; null: no index
};

// Dequantises rows [first_row, first_row + out.size(0)) of W in stored order, rounded once.
struct PackedDequantizeParams {
  Tensor out;  // [n, K]
  PackedWeight w;
  int64_t first_row = 0;
};

struct PackedGemmParams {
  Tensor y;  // [M, N] (gated: [M, N / 2]), dtype of x, or float32
  Tensor x;  // [M, K], K a multiple of 8
  PackedWeight w;
  float alpha = 1;  // 1 if gated
  float beta = 0;   // 0: y is not read; 0 if gated
  // [packed_scratch_floats] float32. Needed below compute capability 9.0 and from 12.0 on.
  Tensor scratch{};
};

inline int64_t packed_scratch_floats(const PackedWeight& w, int64_t max_rows) {
  return w.slices() == 1 ? 0 : w.slices() * w.n * std::min<int64_t>(max_rows, kMaxSkinnyRows);
}

inline void check_packed_weight(const PackedWeight& w) {
  const PackedLayout& of = w.layout;
  CHECK(w.blocks != nullptr && w.n > 0 && w.k > 0 && (of.planes == 1 || of.planes == 2),
        "a packed W is [{}, {}] of {} planes, expected memory, a size, and 1 or 2 planes", w.n, w.k,
        of.planes);
  CHECK((of.codes != Codes::kInt4 && of.codes != Codes::kInt8) || of.scale_dtype == DType::kF16 ||
            of.scale_dtype == DType::kBF16,
        "the scales of an integer W are {}, expected float16 or bfloat16", name_of(of.scale_dtype));
  CHECK(of.planes == 1 || of.codes == Codes::kInt4,
        "a packed W of two planes has another code than int4");
  CHECK(of.codes != Codes::kOther || (of.decode != nullptr && of.other_block_bytes > 0),
        "a W in a layout from outside has no decode function or no size, expected both");
  CHECK(of.scale_rows == 1 || of.scale_rows == 8,
        "{} rows of a packed W share a scale, expected 1 or 8", of.scale_rows);
  const bool integers = of.codes == Codes::kInt4 || of.codes == Codes::kInt8;
  const bool two_levels = of.codes == Codes::kK4 || of.codes == Codes::kK8;
  const bool grouped = two_levels ? of.group == (of.codes == Codes::kK4 ? 32 : 16)
                                  : of.group == 32 || (of.group == 16 && of.bits() == 4) ||
                                        (of.group == 0 && of.codes != Codes::kE2m1);
  CHECK(grouped && (of.group == 0 || integers || two_levels || of.scale_rows == 8) &&
            (of.codes != Codes::kInt8 || of.group == 32) && (of.planes == 1 || of.group == 0),
        "{} k and {} rows of a packed W of {} bits share a scale; expected 32 k, or 16 of 4-bit "
        "codes and 8-bit K-quants, and 8 rows of floats",
        of.group, of.scale_rows, of.bits());
  CHECK(two_levels ? of.minimum || of.codes == Codes::kK8 : !of.minimum && !of.halves,
        "a packed W of {} bits has {} and {}; expected a minimum of 4-bit K-quants, and neither of "
        "other integers",
        of.bits(), of.minimum ? "a minimum" : "no minimum",
        of.halves ? "float16 scales" : "no float16 scales");
  CHECK(!w.gated || w.n % 16 == 0, "a gated packed W has {} rows, expected a multiple of 16", w.n);
}

inline void check_packed_gemm(const PackedGemmParams& p) {
  check_packed_weight(p.w);
  CHECK(p.x.num_dims() == 2 && p.y.num_dims() == 2 && p.x.size(1) == p.w.k &&
            p.y.size(0) == p.x.size(0) && p.y.size(1) == p.w.out_features(),
        "packed_gemm: y {} = x {} times a packed W [{}, {}]^T does not fit", p.y.shape_text(),
        p.x.shape_text(), p.w.n, p.w.k);
  CHECK(p.w.k % 8 == 0, "packed_gemm: K is {}, expected a multiple of 8", p.w.k);
  CHECK(!p.w.gated || (p.alpha == 1 && p.beta == 0),
        "packed_gemm: alpha {} and beta {} of a gated W, expected 1 and 0", p.alpha, p.beta);
  CHECK(is_floating(p.x.dtype()) && (p.y.dtype() == p.x.dtype() || p.y.dtype() == DType::kF32),
        "packed_gemm: y is {} and x {}; expected one floating dtype, y may be float32",
        name_of(p.y.dtype()), name_of(p.x.dtype()));
}

inline void check_packed_quantize(const PackedQuantizeParams& p) {
  check_packed_weight(p.w);
  CHECK(p.w.layout.codes == Codes::kInt4 && p.w.layout.group == 0 && !p.w.layout.zero_points &&
            (!p.w.gated || p.index == nullptr),
        "packed_quantize: W is not int4, has zero points or is gated with an index, expected int4 "
        "and neither");
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

REGISTER_OP(packed_quantize, PackedQuantizeParams)
REGISTER_OP(packed_dequantize, PackedDequantizeParams)
REGISTER_OP(packed_gemm, PackedGemmParams)

}  // namespace cpmcu
