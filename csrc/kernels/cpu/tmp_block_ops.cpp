// Stand-in for the CPU ops of lattice.h and block_conv.h, so that the drafters can be tested. Whoever
// lands csrc/kernels/cpu/{block_rows,pair_scores,lattice_tree,block_conv}.cpp deletes this file.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#include "core/half.h"
#include "kernels/layer/block_conv.h"
#include "kernels/tree/lattice.h"
namespace cpmcu::cpu {
void block_rows(const Context&, const BlockRowsParams& p) {
  p.seq_token_begin[0] = 0;
  for (int b = 0; b < p.num_seqs; ++b) {
    p.seq_token_begin[b + 1] = (b + 1) * p.num_rows;
    for (int j = 0; j < p.num_rows; ++j) {
      const int r = b * p.num_rows + j, slot = p.seq_slots[b];
      p.ids[r] = j ? p.mask_id : p.next_tokens[slot];
      p.positions[r] = p.lengths[slot] + j;
      p.token_seqs[r] = b;
      p.all_masks[r] = p.num_rows == 64 ? ~0ull : (1ull << p.num_rows) - 1;
      if (j) p.mask_rows[b * (p.num_rows - 1) + j - 1] = r;
    }
  }
}
static float at(const Tensor& t, int64_t i) {
  float v = 0;
  dispatch_host_dtype(t.dtype(), [&](auto e) { v = to_float(t.as<decltype(e)>()[i]); });
  return v;
}
void pair_scores(const Context&, const PairScoresParams& p) {
  const int k = p.topk, r = (int)p.predecessors.size(1);
  const auto id = [&](int c) { return p.id_map ? p.id_map[c] : c; };
  for (int b = 0; b < p.num_seqs; ++b)
    for (int d = 0; d < p.depth; ++d) {
      const int row = b * p.depth + d;
      double mass = 0;
      for (int j = 0; j < k; ++j) {
        mass += std::exp((double)p.logprobs[row * k + j]);
        p.tokens[row * k + j] = id(p.candidates[row * k + j]);
      }
      for (int a = 0; a < (d ? k : 1); ++a) {
        const int64_t prev = d ? p.tokens[(row - 1) * k + a] : p.next_tokens[p.seq_slots[b]];
        std::vector<double> s(k);
        double sum = p.keeps_rest ? std::max(0.0, 1 - mass) : 0;
        for (int j = 0; j < k; ++j) {
          s[j] = p.logprobs[row * k + j];
          for (int i = 0; i < r; ++i)
            s[j] += (double)at(p.predecessors, prev * r + i) * (p.gates.empty() ? 1.f : at(p.gates, (int64_t)row * r + i)) *
                    at(p.successors, (int64_t)p.candidates[row * k + j] * r + i);
          sum += std::exp(s[j]);
        }
        for (int j = 0; j < k; ++j)
          p.pairs[((int64_t)row * k + a) * k + j] = (float)(s[j] - std::log(sum) + (p.keeps_rest ? 0 : std::log(mass)));
      }
    }
}
void lattice_tree(const Context&, const LatticeTreeParams& p) {
  const Lattice& l = p.lattice;
  const int k = l.topk, m = p.draft.num_tokens;
  struct Node { int depth, cand; float score; int parent; bool on; int made, first; };
  for (int b = 0; b < l.num_seqs; ++b) {
    const auto score = [&](int d, int a, int j) {
      const float s = l.scores ? l.scores[((int64_t)b * l.depth + d) * k + j] : l.pairs[(((int64_t)b * l.depth + d) * k + a) * k + j];
      return std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
    };
    const auto order = [&](int d, int a) {
      std::vector<int> o(k);
      for (int j = 0; j < k; ++j) o[j] = j;
      std::stable_sort(o.begin(), o.end(), [&](int x, int y) { return score(d, a, x) > score(d, a, y); });
      return o;
    };
    for (int i = 0; i < m; ++i) p.draft.tokens[b * m + i] = -1, p.draft.parents[b * m + i] = p.chain ? i : 0, p.draft.scores[b * m + i] = -INFINITY;
    if (p.chain) {
      int a = 0; float total = 0;
      for (int d = 0; d < std::min(p.depth, m); ++d) {
        const int j = order(d, a)[0];
        if (score(d, a, j) == -INFINITY) break;
        total += score(d, a, j);
        p.draft.tokens[b * m + d] = l.tokens[((int64_t)b * l.depth + d) * k + j];
        p.draft.scores[b * m + d] = total;
        a = j;
      }
      continue;
    }
    struct Entry { float score; int depth, cand, rank, parent_cand, parent; float parent_score; bool parent_on; };
    std::vector<Entry> frontier;
    const auto push = [&](int d, int parent_cand, int rank, int parent, float parent_score, bool on) {
      if (d >= p.depth || rank >= k) return;
      const int j = order(d, parent_cand)[rank];
      const float s = score(d, parent_cand, j);
      if (s == -INFINITY) return;
      frontier.push_back({parent_score + s + (on ? 0 : p.off_path), d, j, rank, parent_cand, parent, parent_score, on});
    };
    push(0, 0, 0, 0, 0, true);
    for (int n = 0; n < m && !frontier.empty(); ++n) {
      size_t best = 0;
      for (size_t i = 1; i < frontier.size(); ++i) if (frontier[i].score > frontier[best].score) best = i;
      const Entry e = frontier[best];
      frontier.erase(frontier.begin() + best);
      p.draft.tokens[b * m + n] = l.tokens[((int64_t)b * l.depth + e.depth) * k + e.cand];
      p.draft.parents[b * m + n] = e.parent;
      p.draft.scores[b * m + n] = e.score;
      push(e.depth, e.parent_cand, e.rank + 1, e.parent, e.parent_score, e.parent_on);
      push(e.depth + 1, e.cand, 0, n + 1, e.score, e.parent_on && e.rank == 0);
    }
  }
}
void block_conv(const Context&, const BlockConvParams& p) {
  dispatch_host_dtype(p.x.dtype(), [&](auto e) {
    using T = decltype(e);
    const int64_t h = p.x.size(1);
    const int taps = (int)p.base.size(0);
    for (int64_t t = 0; t < p.x.size(0); ++t)
      for (int64_t c = 0; c < h; ++c) {
        float y = 0;
        for (int i = 0; i < taps && i <= t % p.num_rows; ++i)
          y += (to_float(p.base.as<T>()[i * h + c]) + to_float(p.delta.as<T>()[t * p.delta.size(1) + p.first + i * (h / p.group) + c / p.group])) * to_float(p.x.as<T>()[(t - i) * h + c]);
        T& out = p.out.as<T>()[t * h + c];
        out = from_float<T>(y + (p.adds ? to_float(out) : 0));
      }
  });
}
}  // namespace cpmcu::cpu
