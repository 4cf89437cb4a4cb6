// The GEMMs of experts for the many pairs of a prompt: x [P, K] is sorted by expert.
//
// Row i of x belongs to pair routing.pairs[i]. `gather_pairs` makes it from the rows of tokens. So
// an expert's rows are consecutive, and a kernel loads them as those of a dense matrix. The order
// of additions depends on N and K only; a pair's bits depend neither on the other pairs nor on
// their number. expert_gemm has another order, so a phase never mixes the two.
#pragma once

#include "kernels/moe/expert_gemm.h"

namespace cpmcu {

// Whether this device has these GEMMs.
inline bool has_sorted_gemm(const Context& ctx) {
  return !ctx.device.is_cuda() || has_prompt_gemm(ctx.compute_capability);
}

// sorted[i] = x[routing.pairs[i] / routing.top_k]
struct GatherPairsParams {
  Tensor sorted;  // [T k, K]
  Tensor x;       // [T, K], same dtype
  Routing routing;
};

struct SortedRows {
  Tensor y;  // [P, N], gated [P, N / 2]; dtype of x, or float32
  Tensor x;  // [P, K], sorted by expert; K a multiple of 8
  Routing routing;
  // Row i of y is that of pair pairs[i], as in x; false: row p is that of pair p.
  bool sorted_y = false;
};

struct SortedGemmParams {
  SortedRows rows;
  Tensor w;  // [E, N, K], dtype of x
  bool gated = false;
};

struct PackedSortedGemmParams {
  SortedRows rows;
  PackedWeight w;      // weights of expert 0
  int64_t stride = 0;  // bytes from one expert's blocks to the next
};

inline void check_gather_pairs(const GatherPairsParams& p) {
  check_routing(p.routing);
  CHECK(p.x.num_dims() == 2 && p.sorted.num_dims() == 2 && p.x.size(1) == p.sorted.size(1) &&
            p.sorted.size(0) == p.x.size(0) * p.routing.top_k && p.x.dtype() == p.sorted.dtype(),
        "gather_pairs: {} {} from x {} {} does not fit {} pairs a row", name_of(p.sorted.dtype()),
        p.sorted.shape_text(), name_of(p.x.dtype()), p.x.shape_text(), p.routing.top_k);
}

// The same rows for the ops that are not sorted: each pair has its own row of x.
inline ExpertRows rows_of_pairs(const SortedRows& rows) {
  return {.y = rows.y, .x = rows.x, .routing = rows.routing};
}
inline void check_sorted_gemm(const SortedGemmParams& p) {
  check_expert_gemm({.rows = rows_of_pairs(p.rows), .w = p.w, .gated = p.gated});
}
inline void check_packed_sorted_gemm(const PackedSortedGemmParams& p) {
  check_packed_expert_gemm({.rows = rows_of_pairs(p.rows), .w = p.w, .stride = p.stride});
}

REGISTER_OP(gather_pairs, GatherPairsParams)
REGISTER_OP(sorted_gemm, SortedGemmParams)
REGISTER_OP(packed_sorted_gemm, PackedSortedGemmParams)

}  // namespace cpmcu
