// hidden[t] (+)= parts[t] of rank 0 + parts[t] of rank 1 + …
//
// The parts are those of a linear layer whose inputs are divided among the ranks. They are added in
// float32 and in the order of ranks, and the sum is rounded once. So all ranks have the same bits.
// The norm after the sum may be part of the launch.
//
// All ranks call it with equal shapes, in the same order. Each pushes its part to the others and
// waits for theirs. If a part does not come within kWaitSeconds, *Exchange::failed is set. The CPU
// op then throws, and the CUDA kernel ends with a wrong sum.
#pragma once

#include "core/exchange.h"
#include "kernels/layer/rms_norm.h"

namespace cpmcu {

struct RankSumParams {
  Tensor hidden;     // [T, H]
  Tensor part;       // [T, H]: the part of this rank
  bool adds = true;  // false: the sum overwrites hidden
  // Norms `hidden` after the sum. It has no index. Empty: no norm.
  RmsNormParams norm{};
};

// Words of the parts of a sum within a fused layer. A lane of its epilogue has 4 columns of 2 rows:
// 4 words.
inline int64_t rank_sum_words(int64_t rows, int64_t columns) {
  return (rows + 1) / 2 * ((columns + 31) / 32 * 32);
}

inline void check_rank_sum(const Context& ctx, const RankSumParams& p) {
  CHECK_STATE(ctx.exchange != nullptr, "rank_sum runs without an exchange between ranks");
  CHECK(p.hidden.num_dims() == 2 && p.part.num_dims() == 2 && p.hidden.size(0) == p.part.size(0) &&
            p.hidden.size(1) == p.part.size(1) && p.hidden.dtype() == p.part.dtype() &&
            p.part.num_bytes() % 4 == 0,
        "rank_sum: hidden is {} {}, the part {} {}; expected one dtype and shape, and whole words "
        "of 4 bytes",
        name_of(p.hidden.dtype()), p.hidden.shape_text(), name_of(p.part.dtype()),
        p.part.shape_text());
  CHECK(p.part.num_bytes() / 4 <= ctx.exchange->num_words,
        "rank_sum: the part has {} words, the receive buffers {}", p.part.num_bytes() / 4,
        ctx.exchange->num_words);
  CHECK(p.norm.out.empty() || (p.norm.x.data() == p.hidden.data() &&
                               p.norm.out.num_elements() == p.hidden.num_elements() &&
                               p.norm.index == nullptr && p.norm.out_stride == 0),
        "rank_sum: the norm of x {} to {} is not one of all of hidden {}", p.norm.x.shape_text(),
        p.norm.out.shape_text(), p.hidden.shape_text());
}

REGISTER_OP(rank_sum, RankSumParams)

}  // namespace cpmcu
