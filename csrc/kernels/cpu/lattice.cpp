// block_rows, pair_scores and lattice_tree (kernels/tree/lattice.h).
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "kernels/cpu/lattice_parts.h"
#include "kernels/tree/lattice_checks.h"

namespace cpmcu::cpu {
namespace {

int target_id(const PairScoresParams& p, int candidate) {
  return candidate >= 0 && p.block.id_map != nullptr ? p.block.id_map[candidate] : candidate;
}

// All pairs of the candidates of one position.
void score_position(const PairScoresParams& p, int seq, int depth) {
  const int k = p.block.topk, position = seq * p.block.depth + depth;
  const int* candidates = p.block.ids + position * k;
  const CandidateLogprobs known(candidates, p.block.logprobs + position * k, k);
  std::vector<std::vector<float>> successors;
  for (int b = 0; b < k; ++b) {
    successors.push_back(row_of(p.successors, candidates[b]));
    p.tokens[position * k + b] = target_id(p, candidates[b]);
  }
  const float rest = p.keeps_rest ? known.rest() : 0;
  const float more = p.keeps_rest ? 0 : std::log(known.mass);
  const std::vector<float> gate =
      p.gates.empty() ? std::vector<float>() : row_of(p.gates, position);
  for (int a = 0; a < (depth == 0 ? 1 : k); ++a) {
    const int parent =
        depth == 0 ? p.block.next_tokens[p.block.seq_slots[seq]] : target_id(p, candidates[a - k]);
    std::vector<float> logits(known.values.size(), kNone);
    if (parent >= 0) {
      std::vector<float> predecessor = row_of(p.predecessors, parent);
      const std::vector<float> more =
          p.predecessor_gates.empty() ? std::vector<float>() : row_of(p.predecessor_gates, parent);
      for (size_t i = 0; i < gate.size(); ++i) {
        predecessor[i] *= more.empty() ? gate[i] : sigmoid(gate[i] + more[i]);
      }
      for (size_t b = 0; b < logits.size(); ++b) {
        float dot = 0;
        for (size_t i = 0; i < predecessor.size(); ++i) dot += predecessor[i] * successors[b][i];
        logits[b] = known.logit(b, dot);
      }
    }
    share_out(logits, rest, more, p.pairs + (int64_t{position} * k + a) * k);
  }
}

// ---- trees

struct Candidate {
  int index;
  float score;
};

// A node that may be added next.
struct Entry {
  float score;         // score of the path to the candidate
  Candidate own;       // the candidate, with its score below its parent
  float parent_score;  // score of the path to the parent
  int depth, parent_candidate;
  int parent;     // number of the parent's node
  bool on_path;   // the parent is on the greedy path
  bool is_first;  // the candidate is the best below its parent
};

class Tree {
 public:
  Tree(const LatticeTreeParams& p, int seq) : p_(p), lattice_(p.lattice), seq_(seq) {}

  void build() {
    const int num_tokens = p_.draft.num_tokens;
    for (int i = 0; i < num_tokens; ++i) write(i, -1, p_.chain ? i : 0, kNone);
    if (p_.chain) return chain();
    add(0, 0, 0, 0, true, {});
    for (int node = 0; node < num_tokens && !frontier_.empty(); ++node) {
      // If scores are equal, the earlier entry is taken.
      const auto best = std::ranges::max_element(frontier_, {}, &Entry::score);
      const Entry entry = *best;
      frontier_.erase(best);
      write(node, token(entry.depth, entry.own.index), entry.parent, entry.score);
      add(entry.depth, entry.parent_candidate, entry.parent, entry.parent_score, entry.on_path,
          entry.own);
      add(entry.depth + 1, entry.own.index, node + 1, entry.score, entry.on_path && entry.is_first,
          {});
    }
  }

 private:
  void chain() {
    float score = 0;
    for (int d = 0, parent = 0; d < std::min(p_.depth, p_.draft.num_tokens); ++d) {
      const std::optional<Candidate> best = best_below(d, parent, {});
      if (!best) return;
      score += best->score;
      parent = best->index;
      write(d, token(d, parent), d, score);
    }
  }

  // The best candidate at `depth` below `parent`, of those that come after `last`.
  std::optional<Candidate> best_below(int depth, int parent,
                                      const std::optional<Candidate>& last) const {
    const int k = lattice_.topk;
    const int64_t position = int64_t{seq_} * lattice_.depth + depth;
    const float* scores = lattice_.scores != nullptr ? lattice_.scores + position * k
                                                     : lattice_.pairs + (position * k + parent) * k;
    std::optional<Candidate> best;
    for (int i = 0; i < k; ++i) {
      const float score = or_none(scores[i]);
      const bool after = !last || score < last->score || (score == last->score && i > last->index);
      if (score != kNone && after && (!best || score > best->score)) best = Candidate{i, score};
    }
    return best;
  }

  void add(int depth, int parent_candidate, int parent, float parent_score, bool on_path,
           const std::optional<Candidate>& last) {
    if (depth >= p_.depth) return;
    const std::optional<Candidate> own = best_below(depth, parent_candidate, last);
    if (!own) return;
    const float score = parent_score + own->score + (on_path ? 0 : p_.off_path);
    if (or_none(score) == kNone) return;
    frontier_.push_back({.score = score,
                         .own = *own,
                         .parent_score = parent_score,
                         .depth = depth,
                         .parent_candidate = parent_candidate,
                         .parent = parent,
                         .on_path = on_path,
                         .is_first = !last});
  }

  int token(int depth, int index) const {
    return lattice_.tokens[(int64_t{seq_} * lattice_.depth + depth) * lattice_.topk + index];
  }
  void write(int node, int token, int parent, float score) const {
    const int at = seq_ * p_.draft.num_tokens + node;
    p_.draft.tokens[at] = token;
    p_.draft.parents[at] = parent;
    p_.draft.scores[at] = score;
  }

  const LatticeTreeParams& p_;
  const Lattice& lattice_;
  const int seq_;
  std::vector<Entry> frontier_;  // in the order in which the entries were made
};

}  // namespace

void block_rows(const Context&, const BlockRowsParams& p) {
  check_block_rows(p);
  p.seq_token_begin[0] = 0;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], first = seq * p.num_rows;
    for (int j = 0; j < p.num_rows; ++j) {
      p.ids[first + j] = j == 0 ? p.next_tokens[slot] : p.mask_id;
      p.positions[first + j] = p.lengths[slot] + j;
      p.token_seqs[first + j] = seq;
      p.all_masks[first + j] = ~uint64_t{0} >> (kMaxTreeSize - p.num_rows);
      if (j > 0) p.mask_rows[first + j - seq - 1] = first + j;
    }
    p.seq_token_begin[seq + 1] = first + p.num_rows;
  }
}

void pair_scores(const Context&, const PairScoresParams& p) {
  check_pair_scores(p);
  for (int seq = 0; seq < p.block.num_seqs; ++seq) {
    for (int depth = 0; depth < p.block.depth; ++depth) score_position(p, seq, depth);
  }
}

void lattice_tree(const Context&, const LatticeTreeParams& p) {
  check_lattice_tree(p);
  for (int seq = 0; seq < p.lattice.num_seqs; ++seq) Tree(p, seq).build();
}

}  // namespace cpmcu::cpu
