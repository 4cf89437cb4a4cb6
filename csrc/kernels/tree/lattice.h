// Lattices of a block drafter, and trees from them. One pass of a block drafter gives the logits of
// D positions. The K likeliest tokens of each position are its candidates.
//
//   score     of candidate b at depth d below candidate a of depth d - 1: its log-probability there
//   path      one candidate at each depth from 0 on; its score is the sum of its candidates' scores
//
// A lattice without pairs has one score for each candidate, whatever its parent is. At depth 0 the
// parent is the root, and row 0 of the pairs holds the scores.
#pragma once

#include "kernels/op.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

struct Lattice {
  int num_seqs = 0;               // B
  int depth = 0;                  // D <= kMaxDraftDepth
  int topk = 0;                   // K <= kMaxTopk
  const int* tokens = nullptr;    // [B, D, K] ids of the target
  const float* scores = nullptr;  // [B, D, K]; null: `pairs` has the scores
  const float* pairs = nullptr;   // [B, D, K (parent), K (child)], read if `scores` is null
};

// The candidates of all positions of a draft block, and the roots before the first position.
struct BlockCandidates {
  int num_seqs = 0;                 // B
  int depth = 0;                    // D
  int topk = 0;                     // K
  const int* ids = nullptr;         // [B, D, K] ids of the draft
  const float* logprobs = nullptr;  // [B, D, K]
  const int* id_map = nullptr;  // [draft vocabulary] draft id -> target id; null: the ids are equal
  const int* seq_slots = nullptr;    // [B]
  const int* next_tokens = nullptr;  // [slots] the roots: the parents at depth 0
};

// The rows of a draft block of B sequences: row 0 is the root, the last emitted token. Rows 1 to
// R - 1 hold the mask token. Row j is at position lengths[slot] + j.
struct BlockRowsParams {
  int num_seqs = 0;
  int num_rows = 0;  // R <= kMaxTreeSize: number of rows of each sequence
  int mask_id = 0;
  const int* seq_slots = nullptr;    // [B]
  const int* lengths = nullptr;      // [slots]
  const int* next_tokens = nullptr;  // [slots]
  int* ids = nullptr;                // [B, R] out
  int* positions = nullptr;          // [B, R] out
  int* token_seqs = nullptr;         // [B, R] out
  int* seq_token_begin = nullptr;    // [B + 1] out
  uint64_t* all_masks = nullptr;     // [B, R] out: each row sees all R rows
  int* mask_rows = nullptr;          // [B, R - 1] out: the rows that hold the mask token
};
REGISTER_OP(block_rows, BlockRowsParams)

// The scores of pairs of candidates from two codebooks. With candidates a of depth d - 1 and b of
// depth d:
//
//   s(a, b) = logprob(b) + sum_i predecessor[a, i] * gate[d, i] * successor[b, i]
//   pairs   = s(a, b) - log(sum over b of exp(s(a, b)) + rest) + more
//
// With predecessor_gates, the gate depends on the predecessor, too. It is then
// sigmoid(gate[d, i] + predecessor_gates[a, i]).
//
// p is the sum over b of exp(logprob(b)), the probability of all candidates.
//
//   keeps_rest  rest           more    meaning
//   false       0              log p   the pairs below a parent have the probability p (DFlash2)
//   true        max(0, 1 - p)  0       the other tokens keep their logits (DSpark)
struct PairScoresParams {
  BlockCandidates block;
  Tensor predecessors{};       // [V, r] rows of target ids
  Tensor successors{};         // [draft vocabulary, r] rows of draft ids, same dtype
  Tensor gates{};              // [B D, r] same dtype; empty: every gate is 1
  Tensor predecessor_gates{};  // [V, r] same dtype, only together with `gates`; empty: no such term
  bool keeps_rest = false;
  int* tokens = nullptr;   // [B, D, K] out: ids of the target
  float* pairs = nullptr;  // [B, D, K, K] out; at depth 0 only row 0 (the root) is written
};
REGISTER_OP(pair_scores, PairScoresParams)

// Drafts the M paths of a lattice with the highest scores, as a tree. Nodes are added best-first,
// so each parent precedes its children. Such a tree of marginals is DDTree's. If two scores are
// equal, the node that became possible first wins; a sibling precedes a child. If candidates have
// equal scores, the one with the lower index is first.
//
// A chain is the greedy path: at each depth the best candidate below the one before. It has
// min(M, depth) tokens.
//
// NaN counts as -inf. A candidate whose score is -inf is never drafted; missing tokens are -1.
struct LatticeTreeParams {
  Lattice lattice;
  int depth = 0;  // maximum number of tokens of a path, at most the lattice's depth
  bool chain = false;
  // A number of at most 0, added to the score of each node whose parent is not on the greedy path.
  // Without pairs the score of a child does not depend on its parent. So it is too high below an
  // unlikely parent.
  float off_path = 0;
  Draft draft;  // out, with parents and scores
};
REGISTER_OP(lattice_tree, LatticeTreeParams)

}  // namespace cpmcu
