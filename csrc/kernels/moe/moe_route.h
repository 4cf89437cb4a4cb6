// Routes tokens to experts: a softmax over the experts in float32, and the k largest.
//
// The k experts of a token are in order of rank: the larger logit first, of equal logits the lower
// expert. NaN counts as the smallest logit, so the k experts always differ. The weight of an expert
// is its probability; with `renormalise`, divided by the sum of the k probabilities.
//
// The pair (token t, rank j) has the number t * k + j. The op also sorts the pairs by expert, which
// is what expert_gemm reads: each expert's weights are read once, however many tokens chose it.
#pragma once

#include <algorithm>

#include "core/carver.h"
#include "kernels/op.h"

namespace cpmcu {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kFewTokens = 64;  // up to this number of tokens, one CTA chooses and sorts

// An expert and its pairs, pairs[begin, begin + count). A CTA of a GEMM loads it at once.
struct alignas(16) ExpertSpan {
  int expert, begin, count;
  int pair;  // number of the only pair; -1: look it up in `pairs`
};

// The experts of the tokens of a step, in device memory. P = T * k pairs.
struct Routing {
  int num_experts = 0;
  int top_k = 0;
  int* experts = nullptr;    // [P] expert of each pair
  float* weights = nullptr;  // [P] weight of each pair
  int* pairs = nullptr;      // [P] numbers of the pairs, sorted by expert, then by number
  int* offsets = nullptr;    // [E + 1]: the pairs of expert e begin at pairs[offsets[e]]
  // [E]: the numbers of the experts with pairs, ascending. num_active of them are valid.
  int* active = nullptr;
  int* num_active = nullptr;
  // [min(E, P)]: the spans of the experts in `active`, then empty spans.
  ExpertSpan* spans = nullptr;

  // Assigns the arrays for up to `num_tokens` tokens.
  void layout(Carver& carver, int64_t num_tokens) {
    const int64_t num_pairs = num_tokens * top_k;
    experts = carver.take<int>(num_pairs);
    weights = carver.take<float>(num_pairs);
    pairs = carver.take<int>(num_pairs);
    offsets = carver.take<int>(num_experts + 1);
    active = carver.take<int>(num_experts);
    num_active = carver.take<int>(1);
    spans = carver.take<ExpertSpan>(std::min<int64_t>(num_experts, num_pairs));
  }
};

struct MoeRouteParams {
  Tensor logits;  // [T, columns] float32; the first E columns are the experts
  bool renormalise = false;
  Routing routing;  // output
};

inline void check_routing(const Routing& routing) {
  CHECK(routing.num_experts >= 1 && routing.num_experts <= kMaxExperts,
        "a router has {} experts, expected 1 to {}", routing.num_experts, kMaxExperts);
  CHECK(routing.top_k >= 1 && routing.top_k <= kMaxTopK && routing.top_k <= routing.num_experts,
        "a router of {} experts chooses {}, expected 1 to {}", routing.num_experts, routing.top_k,
        std::min(kMaxTopK, routing.num_experts));
}

inline void check_moe_route(const MoeRouteParams& p) {
  check_routing(p.routing);
  CHECK(p.logits.num_dims() == 2 && p.logits.dtype() == DType::kF32 &&
            p.logits.size(1) >= p.routing.num_experts,
        "moe_route: logits are {} {}, expected float32 rows of at least {}",
        name_of(p.logits.dtype()), p.logits.shape_text(), p.routing.num_experts);
}

REGISTER_OP(moe_route, MoeRouteParams)

}  // namespace cpmcu
