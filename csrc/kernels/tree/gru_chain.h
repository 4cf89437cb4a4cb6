// Steps of a chain that a recurrent network drafts among candidates: the head of Domino.
//
// The network is a GRU without biases, which reads the embeddings x of the drafted tokens. With its
// state s of G values:
//
//   r  = sigmoid((W_input x)[0, G) + (W_state s)[0, G))
//   z  = sigmoid((W_input x)[G, 2 G) + (W_state s)[G, 2 G))
//   n  = tanh((W_input x)[2 G, 3 G) + r (W_state s)[2 G, 3 G))
//   s' = (1 - z) n + z s
#pragma once

#include "kernels/op.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

struct GruCellParams {
  Tensor from_input{};  // [B, 3 G] float32: W_input x
  Tensor from_state{};  // [B, 3 G] float32: W_state s; empty: s is 0
  Tensor state{};       // [B, G] s before the call, s' after it
  Tensor copy{};  // [B, G] out: s' again, in rows at a distance of copy_stride; dtype of `state`
  int64_t copy_stride = 0;
};
REGISTER_OP(gru_cell, GruCellParams)

// Chooses token `level` of each chain: the candidate b with the largest logit.
//
//   logit(b) = logprob(b) + sum_i successor[b, i] * silu(fixed[level, i] + moving[i])
//
// Without `moving`, logit(b) = logprob(b). The score of a chain is the sum of
// log(exp(logit(b)) / (sum over b of exp(logit(b)) + rest)), where other tokens have the
// probability rest = max(0, 1 - sum over b of exp(logprob(b))). If logits are equal, the
// first candidate is chosen. NaN counts as -inf. If no candidate exists, the chain ends; missing
// tokens are -1.
struct ChainStepParams {
  int num_seqs = 0;  // B
  int depth = 0;     // D
  int topk = 0;      // K
  int level = 0;     // below D; the call for level 0 also clears the draft and writes `roots`
  const int* candidates = nullptr;   // [B, D, K] ids of the target
  const float* logprobs = nullptr;   // [B, D, K]
  const int* seq_slots = nullptr;    // [B]
  const int* next_tokens = nullptr;  // [slots] the roots
  Tensor fixed{};                    // [B D, P] float32
  Tensor moving{};                   // [B, P] float32; empty: logit(b) is logprob(b)
  Tensor successors{};               // [V, P]
  int* roots = nullptr;              // [B] out
  int* tokens = nullptr;             // [B] out: the chosen tokens; 0: no token was chosen
  Draft draft;                       // out, with parents and scores
};
REGISTER_OP(chain_step, ChainStepParams)

// `fixed` has a row for each of `positions`, and `moving` one for each of `rows`.
inline void check_corrections(const char* op, const Tensor& fixed, int64_t positions,
                              const Tensor& moving, int64_t rows, const Tensor& successors) {
  const int64_t width = successors.size(1);
  CHECK(moving.dtype() == DType::kF32 && fixed.dtype() == DType::kF32 && moving.size(0) == rows &&
            moving.size(1) == width && fixed.size(0) == positions && fixed.size(1) == width,
        "{}: fixed is {} {} and moving {} {}, expected float32 rows of {} values", op,
        name_of(fixed.dtype()), fixed.shape_text(), name_of(moving.dtype()), moving.shape_text(),
        width);
}

inline void check_gru_cell(const GruCellParams& p) {
  const int64_t rows = p.state.size(0), size = p.state.size(1);
  const auto fits = [&](const Tensor& x) {
    return x.dtype() == DType::kF32 && x.num_dims() == 2 && x.size(0) == rows &&
           x.size(1) == 3 * size;
  };
  CHECK(fits(p.from_input) && (p.from_state.empty() || fits(p.from_state)),
        "gru_cell: from_input is {} {} and from_state {}, expected float32 [{}, {}]",
        name_of(p.from_input.dtype()), p.from_input.shape_text(), p.from_state.shape_text(), rows,
        3 * size);
  CHECK(p.copy.dtype() == p.state.dtype() && p.copy.size(0) == rows && p.copy_stride >= size,
        "gru_cell: the copy is {} {} with rows of {} elements, expected {} [{}, {}]",
        name_of(p.copy.dtype()), p.copy.shape_text(), p.copy_stride, name_of(p.state.dtype()), rows,
        size);
}

inline void check_chain_step(const ChainStepParams& p) {
  CHECK(p.topk >= 1 && p.topk <= kMaxTopk && p.depth >= 1 && p.depth <= kMaxDraftDepth &&
            p.num_seqs >= 0,
        "chain_step: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}",
        p.topk, p.depth, p.num_seqs, kMaxTopk, kMaxDraftDepth);
  CHECK(p.level >= 0 && p.level < p.depth && p.level < p.draft.num_tokens,
        "chain_step: level {} of a chain of {} tokens, expected one of its tokens and of {} "
        "positions",
        p.level, p.draft.num_tokens, p.depth);
  if (p.moving.empty()) return;
  check_corrections("chain_step", p.fixed, int64_t{p.num_seqs} * p.depth, p.moving, p.num_seqs,
                    p.successors);
}

}  // namespace cpmcu
