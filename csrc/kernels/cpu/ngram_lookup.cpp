#include <algorithm>
#include <vector>

#include "kernels/tree/tree_checks.h"

namespace cpmcu::cpu {

void ngram_lookup(const Context&, const NgramLookupParams& p) {
  check_ngram(p);
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq];
    const int* history = p.history + int64_t{slot} * p.max_len;
    int* chain = p.chain + seq * p.num_tokens;
    std::fill(chain + p.first, chain + p.num_tokens, -1);
    if (std::any_of(chain, chain + p.first, [](int token) { return token < 0; })) continue;

    std::vector<int> text(history, history + p.lengths[slot]);
    text.push_back(p.next_tokens[slot]);
    text.insert(text.end(), chain, chain + p.first);
    const int size = static_cast<int>(text.size());
    // The longest n-gram that ends both at `end` and at the end of the text; ties go to the latest.
    int best = p.min_ngram - 1, best_end = 0;
    for (int end = size - 1; end > 0 && best < p.max_ngram; --end) {
      int n = 0;
      while (n < std::min(end, p.max_ngram) && text[end - 1 - n] == text[size - 1 - n]) ++n;
      if (n > best) best = n, best_end = end;
    }
    if (best_end == 0) continue;
    for (int i = p.first; i < p.num_tokens; ++i) {
      chain[i] = text[best_end + (i - p.first) % (size - best_end)];
    }
  }
}

}  // namespace cpmcu::cpu
