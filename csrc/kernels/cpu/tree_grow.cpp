// Growth of draft trees: levels of candidates, and the selection of nodes (kernels/tree/tree.h).
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/tree/tree_checks.h"

namespace cpmcu::cpu {
namespace {

// The indices of the `wanted` largest scores in descending order; ties go to the lower index.
std::vector<int> best_of(const float* scores, int count, int wanted) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [scores](int a, int b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  order.resize(wanted);
  return order;
}

uint64_t bit(int i) { return uint64_t{1} << i; }

// Fills the step tokens that verify a sequence's tree.
void write_rows(const TokenTrees& trees, int seq, int slot, int length) {
  if (seq == 0) trees.seq_token_begin[0] = 0;
  for (int row = seq * trees.num_nodes; row < (seq + 1) * trees.num_nodes; ++row) {
    trees.token_ids[row] = std::max(trees.tokens[row], 0);
    trees.token_positions[row] = length + trees.depths[row];
    trees.token_slots[row] = slot;
    trees.token_seqs[row] = seq;
  }
  trees.seq_token_begin[seq + 1] = (seq + 1) * trees.num_nodes;
}

}  // namespace

void tree_expand(const Context&, const TreeExpandParams& p) {
  check_expand(p);
  const DraftBeam& beam = p.beam;
  const int k = beam.topk, level = p.level, num_all = num_candidates(k, beam.depth);
  const int num_new = level == 0 ? k : k * k;
  const int first = level == 0 ? 0 : k + (level - 1) * k * k;
  beam.seq_token_begin[0] = 0;
  for (int seq = 0; seq < beam.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    if (level == 0) p.draft_lengths[slot] += std::max(p.accepted_counts[slot], 1);
    float* scores = beam.scores + seq * num_all + first;
    int* tokens = beam.tokens + seq * num_all + first;
    float* token_scores = beam.token_scores + seq * k;
    uint64_t* ancestor_masks = beam.ancestor_masks + seq * k;
    for (int c = 0; c < num_new; ++c) {
      scores[c] = (level == 0 ? 0 : token_scores[c / k]) + p.topk_logprobs[seq * num_new + c];
      tokens[c] = p.topk_tokens[seq * num_new + c];
    }
    std::vector<int> chosen(k);
    if (level == 0) {
      std::iota(chosen.begin(), chosen.end(), 0);
    } else {
      chosen = best_of(scores, num_new, k);
    }
    const std::vector<uint64_t> old_masks(ancestor_masks, ancestor_masks + k);
    for (int r = 0; r < k; ++r) {
      const int c = chosen[r], row = seq * k + r, own_bit = level * k + r;
      beam.level_candidates[(seq * beam.depth + level) * k + r] = first + c;
      token_scores[r] = scores[c];
      ancestor_masks[r] = level == 0 ? 0 : old_masks[c / k];
      if (own_bit < kMaxTreeSize)
        ancestor_masks[r] |= bit(own_bit);  // the draft never runs the last level
      beam.token_ids[row] = tokens[c];
      beam.token_parents[row] = level == 0 ? seq : seq * k + c / k;
      beam.token_positions[row] = p.draft_lengths[slot] + level;
      beam.token_seqs[row] = seq;
    }
    beam.seq_token_begin[seq + 1] = (seq + 1) * k;
  }
}

void draft_select(const Context&, const DraftSelectParams& p) {
  check_select(p);
  const DraftBeam& beam = p.beam;
  const int k = beam.topk, num_tokens = p.draft.num_tokens;
  const int num_all = num_candidates(k, beam.depth);
  for (int seq = 0; seq < beam.num_seqs; ++seq) {
    const float* scores = beam.scores + seq * num_all;
    const std::vector<int> chosen = best_of(scores, num_all, num_tokens);
    std::vector<int> node_of(num_all, 0);
    for (int i = 0; i < num_tokens; ++i) {
      const int candidate = chosen[i], at = seq * num_tokens + i;
      node_of[candidate] = i + 1;
      int parent = 0;
      if (candidate >= k) {
        const int level = (candidate - k) / (k * k), row = (candidate - k) % (k * k) / k;
        parent = node_of[beam.level_candidates[(seq * beam.depth + level) * k + row]];
      }
      p.draft.tokens[at] = beam.tokens[seq * num_all + candidate];
      p.draft.parents[at] = parent;
      p.draft.scores[at] = scores[candidate];
    }
  }
}

void tree_build(const Context&, const TreeBuildParams& p) {
  check_build(p);
  const int num_nodes = p.trees.num_nodes, num_tokens = p.draft.num_tokens;
  for (int seq = 0; seq < p.trees.num_seqs; ++seq) {
    int* tokens = p.trees.tokens + seq * num_nodes;
    int* parents = p.trees.parents + seq * num_nodes;
    int* depths = p.trees.depths + seq * num_nodes;
    uint64_t* masks = p.trees.masks + seq * num_nodes;
    const int slot = p.seq_slots[seq];
    tokens[0] = p.slots.next_tokens[slot];
    parents[0] = -1;
    depths[0] = 0;
    masks[0] = 1;
    for (int node = 1; node < num_nodes; ++node) {
      const int at = seq * num_tokens + node - 1;
      int token = node <= num_tokens ? p.draft.tokens[at] : -1;
      int parent = node <= num_tokens && p.draft.parents ? p.draft.parents[at] : node - 1;
      if (parent > 0 && tokens[parent] < 0) token = -1;
      if (token < 0) parent = 0;
      tokens[node] = token < 0 ? -1 : token;
      parents[node] = parent;
      depths[node] = depths[parent] + 1;
      masks[node] = masks[parent] | bit(node);
    }
    write_rows(p.trees, seq, slot, p.slots.lengths[slot]);
  }
}

}  // namespace cpmcu::cpu
