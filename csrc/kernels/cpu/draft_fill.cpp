// A path from the context joins a draft (kernels/tree/draft_fill.h).
#include "kernels/tree/draft_fill.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace cpmcu::cpu {
namespace {

struct Node {
  int token = -1, parent = 0;
  float score = 0;
};

struct Match {
  // `first` is j, `length` is n, `end` is the place (draft_fill.h).
  int first = 0, length = 0, end = 0;
};

float rate(const FillRates& rates, int n) {
  const int at = std::min(n, kMaxNgram);
  const float guess = kFillPrior * static_cast<float>(at) / static_cast<float>(at + 1);
  return (rates.hits[at] + guess) / (rates.trials[at] + kFillPrior);
}

// Root and draft of a sequence. Unused tokens get the score -inf.
std::vector<Node> nodes_of(const DraftFillParams& p, int seq) {
  std::vector<Node> nodes(1);
  for (int i = 0; i < p.draft.num_tokens; ++i) {
    const int at = seq * p.draft.num_tokens + i;
    Node node{.token = p.draft.tokens[at], .parent = p.draft.parents ? p.draft.parents[at] : i};
    node.score = p.draft.scores ? p.draft.scores[at] : kUnknownLogprob * static_cast<float>(i + 1);
    if (std::isnan(node.score)) node.score = -std::numeric_limits<float>::infinity();
    if (node.token < 0 || (node.parent > 0 && nodes[node.parent].token < 0)) {
      node = {.score = -std::numeric_limits<float>::infinity()};
    }
    nodes.push_back(node);
  }
  return nodes;
}

// The first child of `parent`, with `token` unless it is -1. 0: there is none.
int child_of(const std::vector<Node>& nodes, int parent, int token) {
  for (size_t i = 1; i < nodes.size(); ++i) {
    if (nodes[i].token < 0 || nodes[i].parent != parent) continue;
    if (token < 0 || nodes[i].token == token) return static_cast<int>(i);
  }
  return 0;
}

// `text`: the context, then `path_size` tokens of the main path.
Match find_match(const DraftFillParams& p, const std::vector<int>& text, int path_size) {
  Match best{.length = p.min_ngram - 1};
  for (int first = 0; first <= std::min(path_size, p.max_depth - 1); ++first) {
    const int size = static_cast<int>(text.size()) - path_size + first;
    for (int end = size - 1; end > 0 && best.length < p.max_ngram; --end) {
      int n = 0;
      while (n < std::min(end, p.max_ngram) && text[end - 1 - n] == text[size - 1 - n]) ++n;
      if (n > best.length) best = {.first = first, .length = n, .end = end};
    }
  }
  return best;
}

// Writes the M best nodes. A parent comes before its children, since it has no lower score.
void select(const std::vector<Node>& nodes, const Draft& filled, int seq) {
  std::vector<int> order(nodes.size() - 1), number(nodes.size(), -1);
  std::iota(order.begin(), order.end(), 1);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const bool a_used = nodes[a].token >= 0, b_used = nodes[b].token >= 0;
    return a_used != b_used ? a_used : nodes[a].score > nodes[b].score;
  });
  number[0] = 0;
  for (int i = 0; i < filled.num_tokens; ++i) {
    const int at = seq * filled.num_tokens + i;
    const bool used = i < static_cast<int>(order.size()) && nodes[order[i]].token >= 0 &&
                      number[nodes[order[i]].parent] >= 0;
    const Node node = used ? nodes[order[i]] : Node{};
    if (used) number[order[i]] = i + 1;
    filled.tokens[at] = node.token;
    filled.parents[at] = used ? number[node.parent] : 0;
    filled.scores[at] = used ? node.score : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

void draft_fill(const Context&, const DraftFillParams& p) {
  check_fill(p);
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], length = p.slots.lengths[slot];
    const int* history = p.slots.history + int64_t{slot} * p.slots.max_len;
    std::vector<Node> nodes = nodes_of(p, seq);
    std::vector<int> text(history, history + length), main_path{0};
    text.push_back(p.slots.next_tokens[slot]);
    for (int node = child_of(nodes, 0, -1); node > 0; node = child_of(nodes, node, -1)) {
      main_path.push_back(node);
      text.push_back(nodes[node].token);
    }
    const int path_size = static_cast<int>(main_path.size()) - 1;
    const Match match = find_match(p, text, path_size);
    FillPath path{.length = length, .first = match.first, .match = match.length};
    if (match.end > 0) {
      const int size = length + 1 + match.first;
      path.num_tokens = p.max_depth;
      for (int i = 0; i < match.first; ++i) path.tokens[i] = text[length + 1 + i];
      for (int i = match.first; i < p.max_depth; ++i) {
        path.tokens[i] = text[match.end + (i - match.first) % (size - match.end)];
      }
      int node = main_path[match.first];
      for (int i = match.first; i < p.max_depth; ++i) {
        const int n = match.length + i - match.first;
        const float score = nodes[node].score + std::log(rate(p.rates, n));
        int child = child_of(nodes, node, path.tokens[i]);
        if (child > 0) {
          nodes[child].score = std::max(nodes[child].score, score);
        } else {
          child = static_cast<int>(nodes.size());
          nodes.push_back({.token = path.tokens[i], .parent = node, .score = score});
        }
        node = child;
      }
    }
    p.paths[slot] = path;
    select(nodes, p.filled, seq);
  }
}

void fill_observe(const Context&, const FillObserveParams& p) {
  const Accepted& accepted = p.slots.accepted;
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], count = accepted.counts[slot];
    const FillPath& path = p.paths[slot];
    const int* ids = accepted.ids + int64_t{slot} * accepted.max_path;
    const bool is_last = accepted.paths[int64_t{slot} * accepted.max_path] == 0;
    if (!is_last || path.length + count != p.slots.lengths[slot]) continue;
    for (int i = 0; i < std::min(count, path.num_tokens); ++i) {
      const bool hit = path.tokens[i] == ids[i];
      if (i >= path.first) {
        const int n = std::min(path.match + i - path.first, kMaxNgram);
        p.rates.hits[n] += hit ? 1.0f : 0.0f;
        p.rates.trials[n] += 1.0f;
      }
      if (!hit) break;
    }
  }
  for (int n = 0; n <= kMaxNgram; ++n) {
    if (p.rates.trials[n] < kFillTrials) continue;
    p.rates.hits[n] *= 0.5f;
    p.rates.trials[n] *= 0.5f;
  }
}

}  // namespace cpmcu::cpu
