// Trees that a recurrent network drafts among candidates: the head of Domino. gru_chain.h defines
// the network, and drafts chains.
//
// A tree holds the M paths with the highest scores. Scores below a node need the node's state, and
// states are computed level by level, for all nodes of a level at once:
//
//   at level d   node_scores   scores the candidates of position d below each row of level d - 1
//                node_rows     the M best nodes of all levels so far; those of level d are its rows
//                              (the drafter computes the rows' states)
//   at the end   node_draft    the M best nodes of all levels
//
// A child's score is at most its parent's. So each node of the final tree was a row of its level.
// If scores are equal, the node of the earlier level wins, then that of the earlier row, then that
// of the lower candidate.
#pragma once

#include "kernels/tree/gru_chain.h"

namespace cpmcu {

// The rows of all levels, M for each sequence. The rows of a level are sorted, the best first;
// token -1 and score -inf: no row.
struct NodeRows {
  int num_seqs = 0;       // B
  int num_rows = 0;       // M < kMaxTreeSize
  int* tokens = nullptr;  // [D, B, M]
  // [D, B, M] the parent's row in the level before; at level 0, 0 stands for the root.
  int* parents = nullptr;
  float* scores = nullptr;  // [D, B, M] log-probability of the path from the root

  constexpr int64_t at(int level, int seq, int row) const {
    return (int64_t{level} * num_seqs + seq) * num_rows + row;
  }
};

// scores[row, b] = the row's score + log(exp(logit(b)) / (sum over b of exp(logit(b)) + rest)), for
// the logits and `rest` of gru_chain.h. At level 0 the only row is the root, whose score is 0. A
// missing candidate (negative, or NaN) has the score -inf.
struct NodeScoresParams {
  NodeRows rows;
  int depth = 0;                    // D
  int topk = 0;                     // K
  int level = 0;                    // below D
  const int* candidates = nullptr;  // [B, D, K] ids of the target
  const float* logprobs = nullptr;  // [B, D, K]
  Tensor fixed{};                   // [B D, P] float32; empty at level 0: logit(b) is logprob(b)
  Tensor moving{};                  // [B M, P] float32; empty at level 0
  Tensor successors{};              // [V, P]
  float* scores = nullptr;          // [B, M, K] out; at level 0 only row 0 is written
  // Read at level 0 alone: next_tokens[seq_slots[b]] is the root.
  const int* seq_slots = nullptr;    // [B]
  const int* next_tokens = nullptr;  // [slots]
  int* roots = nullptr;              // [B] out
};
REGISTER_OP(node_scores, NodeScoresParams)

struct NodeRowsParams {
  NodeRows rows;  // input: the levels before `level`; output: `level`
  int depth = 0;
  int topk = 0;
  int level = 0;
  const int* candidates = nullptr;
  const float* scores = nullptr;  // the result of node_scores
  // [B M] out: the parent's row, b M + parent; at level 0: b.
  int* state_rows = nullptr;
};
REGISTER_OP(node_rows, NodeRowsParams)

struct NodeDraftParams {
  NodeRows rows;
  int depth = 0;  // number of levels that have rows
  Draft draft;    // out, with parents and scores: the best M = num_tokens rows, best first
};
REGISTER_OP(node_draft, NodeDraftParams)

// ---- checks, for the CPU and CUDA implementations

inline void check_node_rows(const char* op, const NodeRows& rows, int depth, int topk, int level) {
  CHECK(rows.num_seqs >= 0 && rows.num_rows >= 1 && rows.num_rows < kMaxTreeSize && depth >= 1 &&
            depth <= kMaxDraftDepth && topk >= 1 && topk <= kMaxTopk && level >= 0 && level < depth,
        "{}: {} sequences of {} rows, level {} of {}, top-k {}; expected 1 to {} rows, at most {} "
        "levels and a top-k of 1 to {}",
        op, rows.num_seqs, rows.num_rows, level, depth, topk, kMaxTreeSize - 1, kMaxDraftDepth,
        kMaxTopk);
}

inline void check_node_scores(const NodeScoresParams& p) {
  check_node_rows("node_scores", p.rows, p.depth, p.topk, p.level);
  CHECK(p.moving.empty() == (p.level == 0),
        "node_scores: level {} has {}, expected a correction from level 1 on", p.level,
        p.moving.empty() ? "no correction" : "a correction");
  if (p.level == 0) return;
  check_corrections("node_scores", p.fixed, int64_t{p.rows.num_seqs} * p.depth, p.moving,
                    int64_t{p.rows.num_seqs} * p.rows.num_rows, p.successors);
}

inline void check_node_draft(const NodeDraftParams& p) {
  check_node_rows("node_draft", p.rows, p.depth, 1, 0);
  CHECK(p.draft.num_tokens == p.rows.num_rows,
        "node_draft: a draft of {} tokens from {} rows, expected equally many", p.draft.num_tokens,
        p.rows.num_rows);
}

}  // namespace cpmcu
