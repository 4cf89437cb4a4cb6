// node_scores, node_rows and node_draft (kernels/tree/gru_tree.h).
#include "kernels/tree/gru_tree.h"

#include "kernels/cpu/lattice_parts.h"

namespace cpmcu::cpu {
namespace {

// A row of a level, or a candidate that may become a row of its level.
struct Node {
  float score;
  int level, row;     // `row` is the row of the node, or of a candidate's parent
  int candidate = 0;  // index among the K candidates; -1: padding
};

// The `count` best nodes, best first. Nodes with equal scores keep their order.
std::vector<Node> best_of(std::vector<Node> nodes, int count) {
  std::erase_if(nodes, [](const Node& node) { return or_none(node.score) == kNone; });
  std::ranges::stable_sort(nodes, std::ranges::greater{}, &Node::score);
  if (std::ssize(nodes) > count) nodes.resize(static_cast<size_t>(count));
  return nodes;
}

// All rows of the levels before `level`.
std::vector<Node> rows_before(const NodeRows& rows, int level, int seq) {
  std::vector<Node> nodes;
  for (int l = 0; l < level; ++l) {
    for (int row = 0; row < rows.num_rows; ++row) {
      nodes.push_back({rows.scores[rows.at(l, seq, row)], l, row});
    }
  }
  return nodes;
}

// The corrections of the candidates below a row.
std::vector<float> corrections(const NodeScoresParams& p, int seq, int row, const int* candidates) {
  if (p.level == 0) return std::vector<float>(static_cast<size_t>(p.topk));
  return corrections_of(candidates, p.topk, p.successors,
                        row_of(p.fixed, int64_t{seq} * p.depth + p.level),
                        row_of(p.moving, int64_t{seq} * p.rows.num_rows + row));
}

}  // namespace

void node_scores(const Context&, const NodeScoresParams& p) {
  check_node_scores(p);
  for (int seq = 0; seq < p.rows.num_seqs; ++seq) {
    if (p.level == 0) p.roots[seq] = p.next_tokens[p.seq_slots[seq]];
    const int64_t first = (int64_t{seq} * p.depth + p.level) * p.topk;
    const CandidateLogprobs known(p.candidates + first, p.logprobs + first, p.topk);
    for (int row = 0; row < (p.level == 0 ? 1 : p.rows.num_rows); ++row) {
      const float above = p.level == 0 ? 0 : p.rows.scores[p.rows.at(p.level - 1, seq, row)];
      float* const scores = p.scores + (int64_t{seq} * p.rows.num_rows + row) * p.topk;
      const std::vector<float> dots = corrections(p, seq, row, p.candidates + first);
      std::vector<float> logits;
      for (size_t b = 0; b < dots.size(); ++b) logits.push_back(known.logit(b, dots[b]));
      share_out(logits, known.rest(), above, scores);
      for (int b = 0; b < p.topk; ++b) scores[b] = or_none(scores[b]);
    }
  }
}

void node_rows(const Context&, const NodeRowsParams& p) {
  check_node_rows("node_rows", p.rows, p.depth, p.topk, p.level);
  const NodeRows& rows = p.rows;
  for (int seq = 0; seq < rows.num_seqs; ++seq) {
    std::vector<Node> nodes = rows_before(rows, p.level, seq);
    for (int row = 0; row < (p.level == 0 ? 1 : rows.num_rows); ++row) {
      for (int b = 0; b < p.topk; ++b) {
        const float score = p.scores[(int64_t{seq} * rows.num_rows + row) * p.topk + b];
        nodes.push_back({score, p.level, row, b});
      }
    }
    nodes = best_of(std::move(nodes), rows.num_rows);
    std::erase_if(nodes, [&](const Node& node) { return node.level < p.level; });
    nodes.resize(static_cast<size_t>(rows.num_rows), {kNone, p.level, 0, -1});
    const int* const candidates = p.candidates + (int64_t{seq} * p.depth + p.level) * p.topk;
    for (int i = 0; i < rows.num_rows; ++i) {
      const Node& node = nodes[static_cast<size_t>(i)];
      const int64_t at = rows.at(p.level, seq, i);
      rows.tokens[at] = node.candidate < 0 ? -1 : candidates[node.candidate];
      rows.parents[at] = node.row;
      rows.scores[at] = node.score;
      p.state_rows[seq * rows.num_rows + i] = p.level == 0 ? seq : seq * rows.num_rows + node.row;
    }
  }
}

void node_draft(const Context&, const NodeDraftParams& p) {
  check_node_draft(p);
  const NodeRows& rows = p.rows;
  for (int seq = 0; seq < rows.num_seqs; ++seq) {
    const std::vector<Node> best = best_of(rows_before(rows, p.depth, seq), rows.num_rows);
    std::vector<int> numbers(static_cast<size_t>(p.depth * rows.num_rows));
    for (int i = 0; i < rows.num_rows; ++i) {
      const int64_t to = int64_t{seq} * rows.num_rows + i;
      p.draft.tokens[to] = -1;
      p.draft.parents[to] = 0;
      p.draft.scores[to] = kNone;
      if (i >= std::ssize(best)) continue;
      const Node& node = best[static_cast<size_t>(i)];
      const int64_t at = rows.at(node.level, seq, node.row);
      const int above = (node.level - 1) * rows.num_rows + rows.parents[at];
      numbers[static_cast<size_t>(node.level * rows.num_rows + node.row)] = i + 1;
      p.draft.tokens[to] = rows.tokens[at];
      p.draft.parents[to] = node.level == 0 ? 0 : numbers[static_cast<size_t>(above)];
      p.draft.scores[to] = node.score;
    }
  }
}

}  // namespace cpmcu::cpu
