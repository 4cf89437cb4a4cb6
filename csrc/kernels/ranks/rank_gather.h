// out[r] = parts[r] of rank 0 | parts[r] of rank 1 | …: columns that are divided among the ranks,
// such as the logits of a head. The rules for callers of rank_sum apply.
#pragma once

#include "core/exchange.h"
#include "kernels/op.h"

namespace cpmcu {

struct RankGatherParams {
  Tensor out;   // [R, ranks * N] float32
  Tensor part;  // [R, N] float32: the columns of this rank, N a multiple of 4
};

inline void check_rank_gather(const Context& ctx, const RankGatherParams& p) {
  CHECK_STATE(ctx.exchange != nullptr, "rank_gather runs without an exchange between ranks");
  CHECK(p.out.num_dims() == 2 && p.part.num_dims() == 2 && p.out.size(0) == p.part.size(0) &&
            p.out.size(1) == ctx.exchange->num_ranks * p.part.size(1) && p.part.size(1) % 4 == 0 &&
            p.out.dtype() == DType::kF32 && p.part.dtype() == DType::kF32,
        "rank_gather: out is {} {}, the part {} {}; expected float32, and {} times as many columns "
        "as the part, which has a multiple of 4",
        name_of(p.out.dtype()), p.out.shape_text(), name_of(p.part.dtype()), p.part.shape_text(),
        ctx.exchange->num_ranks);
  CHECK(p.part.num_elements() <= ctx.exchange->num_words,
        "rank_gather: the part has {} words, the receive buffers {}", p.part.num_elements(),
        ctx.exchange->num_words);
}

REGISTER_OP(rank_gather, RankGatherParams)

}  // namespace cpmcu
