// Trees whose scores depend on all tokens of a path, by a small recurrent network: the rnn Markov
// head of DSpark. A lattice (kernels/tree/lattice.h) holds pairs, so it cannot hold these scores.
//
// A node has a state s of r values. The root's parent has the state 0. With the parent's state s,
// the node's token a, and the hidden state h of the position after it:
//
//   [g; c; o]  = W [s; predecessor[a]; h] + bias                 3 r values
//   own state  = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
//   logit(b)   = logprob(b) + sum_i successor[b, i] * tanh(o)[i]    of candidate b below the node
//   score(b)   = logit(b) - log(sum over b of exp(logit(b)) + rest)
//
// rest = max(0, 1 - sum over b of exp(logprob(b))): other tokens keep their probability.
#pragma once

#include "kernels/op.h"
#include "kernels/tree/lattice.h"

namespace cpmcu {

constexpr int kMaxRnnRank = 1024;

// The order of nodes, ties, missing candidates and chains are those of lattice_tree. The scores
// below a node are computed when the node is taken.
struct RnnTreeParams {
  BlockCandidates block;
  Tensor inputs{};  // [B D, 3 r] float32: the part of W that multiplies h, times h, plus the bias
  Tensor weight{};  // [3 r, 2 r + H] W; its first 2 r columns are read
  Tensor predecessors{};  // [V, r] rows of target ids, dtype of W
  Tensor successors{};    // [draft vocabulary, r] rows of draft ids, dtype of W
  Tensor states{};        // [B kMaxTreeSize, r] float32: scratch
  int longest = 0;        // maximum number of tokens of a path, at most D
  bool chain = false;
  Draft draft;  // out, with parents and scores
};

inline void check_rnn_tree(const RnnTreeParams& p) {
  CHECK(p.block.topk >= 1 && p.block.topk <= kMaxTopk && p.block.depth >= 1 &&
            p.block.depth <= kMaxDraftDepth && p.block.num_seqs >= 0,
        "rnn_tree: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}",
        p.block.topk, p.block.depth, p.block.num_seqs, kMaxTopk, kMaxDraftDepth);
  CHECK(p.longest >= 1 && p.longest <= p.block.depth,
        "rnn_tree: paths of {} tokens, expected 1 to {}, the positions that have candidates",
        p.longest, p.block.depth);
  CHECK(p.draft.num_tokens >= 0 && p.draft.num_tokens < kMaxTreeSize,
        "rnn_tree: a draft of {} tokens, expected at most {}", p.draft.num_tokens,
        kMaxTreeSize - 1);
  const int64_t rank = p.predecessors.size(1);
  const DType dtype = p.weight.dtype();
  CHECK(rank >= 1 && rank <= kMaxRnnRank && p.successors.size(1) == rank &&
            p.predecessors.dtype() == dtype && p.successors.dtype() == dtype,
        "rnn_tree: codebooks are {} {} and {} {}, expected {} and equally many columns, 1 to {}",
        name_of(p.predecessors.dtype()), p.predecessors.shape_text(), name_of(p.successors.dtype()),
        p.successors.shape_text(), name_of(dtype), kMaxRnnRank);
  CHECK(p.weight.num_dims() == 2 && p.weight.size(0) == 3 * rank && p.weight.size(1) >= 2 * rank,
        "rnn_tree: the weight is {}, expected [{}, at least {}]", p.weight.shape_text(), 3 * rank,
        2 * rank);
  CHECK(p.inputs.dtype() == DType::kF32 &&
            p.inputs.num_elements() == 3 * rank * p.block.num_seqs * p.block.depth,
        "rnn_tree: inputs are {} {}, expected float32 [{}, {}]", name_of(p.inputs.dtype()),
        p.inputs.shape_text(), p.block.num_seqs * p.block.depth, 3 * rank);
  CHECK(p.states.dtype() == DType::kF32 &&
            p.states.num_elements() >= rank * p.block.num_seqs * kMaxTreeSize,
        "rnn_tree: states are {} {}, expected float32 [{}, {}]", name_of(p.states.dtype()),
        p.states.shape_text(), p.block.num_seqs * kMaxTreeSize, rank);
}

REGISTER_OP(rnn_tree, RnnTreeParams)

}  // namespace cpmcu
