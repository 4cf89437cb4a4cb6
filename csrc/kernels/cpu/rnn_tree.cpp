// rnn_tree (kernels/tree/rnn_tree.h).
#include "kernels/tree/rnn_tree.h"

#include <optional>

#include "kernels/cpu/lattice_parts.h"

namespace cpmcu::cpu {
namespace {

// A node whose children have scores.
struct Node {
  float score = 0;            // score of the path to the node
  int depth = 0;              // tokens of the path to the node
  std::vector<float> below;   // scores of the candidates below the node
  std::vector<float> states;  // state of the network after the node
};

// A candidate that may be added next, below a node.
struct Entry {
  float score;  // score of the path to the candidate
  int parent, candidate;
};

class RnnTree {
 public:
  RnnTree(const RnnTreeParams& p, int seq)
      : p_(p), seq_(seq), rank_(static_cast<size_t>(p.predecessors.size(1))) {}

  void build() {
    const int num_tokens = p_.draft.num_tokens;
    for (int i = 0; i < num_tokens; ++i) write(i, -1, p_.chain ? i : 0, kNone);
    take({}, p_.block.next_tokens[p_.block.seq_slots[seq_]], std::vector<float>(rank_));
    for (int i = 0; i < num_tokens && !frontier_.empty(); ++i) {
      // If scores are equal, the earlier entry is taken.
      const auto best = std::ranges::max_element(frontier_, {}, &Entry::score);
      const Entry entry = *best;
      frontier_.erase(best);
      const int depth = nodes_[static_cast<size_t>(entry.parent)].depth;
      const int token = token_of(depth, entry.candidate);
      write(i, token, entry.parent, entry.score);
      if (!p_.chain) add_next(entry.parent, entry.candidate);
      Node node{.score = entry.score, .depth = depth + 1, .below = {}, .states = {}};
      const std::vector<float> state = nodes_[static_cast<size_t>(entry.parent)].states;
      if (node.depth < p_.longest && i + 1 < num_tokens) {
        take(node, token, state);
      } else {
        nodes_.push_back(node);
      }
    }
  }

 private:
  // Adds a node, computes the scores below it, and adds the best candidate there.
  void take(Node node, int token, const std::vector<float>& state) {
    const int64_t position = int64_t{seq_} * p_.block.depth + node.depth;
    const std::vector<float> z = joint(position, token, state);
    std::vector<float> output(rank_);
    node.states.resize(rank_);
    for (size_t i = 0; i < rank_; ++i) {
      const float gate = sigmoid(z[i]);
      node.states[i] = gate * state[i] + (1 - gate) * std::tanh(z[rank_ + i]);
      output[i] = std::tanh(z[2 * rank_ + i]);
    }
    const int* const candidates = p_.block.ids + position * p_.block.topk;
    const CandidateLogprobs known(candidates, p_.block.logprobs + position * p_.block.topk,
                                  p_.block.topk);
    std::vector<float> logits;
    for (size_t b = 0; b < known.values.size(); ++b) {
      const std::vector<float> successor = row_of(p_.successors, candidates[b]);
      float dot = 0;
      for (size_t i = 0; i < rank_; ++i) dot += output[i] * successor[i];
      logits.push_back(known.logit(b, dot));
    }
    node.below.resize(logits.size());
    share_out(logits, known.rest(), 0, node.below.data());
    nodes_.push_back(node);
    add_next(static_cast<int>(nodes_.size()) - 1, -1);
  }

  // W times the state, the token and the position's hidden state, plus bias.
  std::vector<float> joint(int64_t position, int token, const std::vector<float>& state) const {
    const std::vector<float> predecessor = row_of(p_.predecessors, token);
    std::vector<float> z(3 * rank_);
    const auto columns = static_cast<int64_t>(2 * rank_);
    for (size_t row = 0; row < z.size(); ++row) {
      const std::vector<float> weight = row_of(p_.weight, static_cast<int64_t>(row), columns);
      z[row] = p_.inputs.as<float>()[static_cast<size_t>(position) * z.size() + row];
      for (size_t i = 0; i < rank_; ++i) {
        z[row] += weight[i] * state[i] + weight[rank_ + i] * predecessor[i];
      }
    }
    return z;
  }

  // Adds the best candidate below a node among those after `last`. -1: among all.
  void add_next(int parent, int last) {
    const Node& node = nodes_[static_cast<size_t>(parent)];
    const auto score_of = [&](int b) { return node.below[static_cast<size_t>(b)]; };
    std::optional<int> best;
    for (int b = 0; b < p_.block.topk; ++b) {
      const float score = or_none(score_of(b));
      const bool after =
          last < 0 || score < score_of(last) || (score == score_of(last) && b > last);
      if (score != kNone && after && (!best || score > score_of(*best))) best = b;
    }
    if (!best || or_none(node.score + score_of(*best)) == kNone) return;
    frontier_.push_back({node.score + score_of(*best), parent, *best});
  }

  int token_of(int depth, int candidate) const {
    const int id =
        p_.block.ids[(int64_t{seq_} * p_.block.depth + depth) * p_.block.topk + candidate];
    return p_.block.id_map != nullptr ? p_.block.id_map[id] : id;
  }
  void write(int node, int token, int parent, float score) const {
    const int at = seq_ * p_.draft.num_tokens + node;
    p_.draft.tokens[at] = token;
    p_.draft.parents[at] = parent;
    p_.draft.scores[at] = score;
  }

  const RnnTreeParams& p_;
  const int seq_;
  const size_t rank_;
  std::vector<Node> nodes_;
  std::vector<Entry> frontier_;  // in the order in which the entries were made
};

}  // namespace

void rnn_tree(const Context&, const RnnTreeParams& p) {
  check_rnn_tree(p);
  for (int seq = 0; seq < p.block.num_seqs; ++seq) RnnTree(p, seq).build();
}

}  // namespace cpmcu::cpu
