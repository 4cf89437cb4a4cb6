// gru_cell and chain_step (kernels/tree/gru_chain.h).
#include "kernels/tree/gru_chain.h"

#include "kernels/cpu/lattice_parts.h"

namespace cpmcu::cpu {
namespace {

// Returns the corrections that the head adds to the log-probabilities of the candidates.
std::vector<float> corrections(const ChainStepParams& p, int seq, const int* candidates) {
  if (p.moving.empty()) return std::vector<float>(static_cast<size_t>(p.topk));
  return corrections_of(candidates, p.topk, p.successors,
                        row_of(p.fixed, int64_t{seq} * p.depth + p.level), row_of(p.moving, seq));
}

void choose(const ChainStepParams& p, int seq) {
  const int begin = seq * p.draft.num_tokens;
  if (p.level == 0) {
    p.roots[seq] = p.next_tokens[p.seq_slots[seq]];
    for (int i = 0; i < p.draft.num_tokens; ++i) {
      p.draft.tokens[begin + i] = -1;
      p.draft.parents[begin + i] = i;
      p.draft.scores[begin + i] = kNone;
    }
  }
  p.tokens[seq] = 0;
  const float before = p.level == 0 ? 0 : p.draft.scores[begin + p.level - 1];
  if (before == kNone) return;
  const int64_t first = (int64_t{seq} * p.depth + p.level) * p.topk;
  const std::vector<float> dots = corrections(p, seq, p.candidates + first);
  const CandidateLogprobs known(p.candidates + first, p.logprobs + first, p.topk);
  std::vector<float> logits, scores(dots.size());
  for (size_t b = 0; b < dots.size(); ++b) logits.push_back(known.logit(b, dots[b]));
  share_out(logits, known.rest(), 0, scores.data());
  const auto best = std::ranges::max_element(logits) - logits.begin();
  const float score = before + scores[static_cast<size_t>(best)];
  if (or_none(score) == kNone) return;
  p.tokens[seq] = p.candidates[first + best];
  p.draft.tokens[begin + p.level] = p.tokens[seq];
  p.draft.scores[begin + p.level] = score;
}

}  // namespace

void gru_cell(const Context&, const GruCellParams& p) {
  check_gru_cell(p);
  const int64_t size = p.state.size(1);
  dispatch_host_dtype(p.state.dtype(), [&](auto t) {
    using T = decltype(t);
    for (int64_t row = 0; row < p.state.size(0); ++row) {
      const std::vector<float> input = row_of(p.from_input, row);
      const std::vector<float> of_state =
          p.from_state.empty() ? std::vector<float>(input.size()) : row_of(p.from_state, row);
      for (int64_t i = 0; i < size; ++i) {
        const auto at = [&](int part) { return static_cast<size_t>(part * size + i); };
        T& state = p.state.as<T>()[row * size + i];
        const float before = p.from_state.empty() ? 0 : to_float(state);
        const float reset = sigmoid(input[at(0)] + of_state[at(0)]);
        const float keep = sigmoid(input[at(1)] + of_state[at(1)]);
        const float fresh = std::tanh(input[at(2)] + reset * of_state[at(2)]);
        state = from_float<T>((1 - keep) * fresh + keep * before);
        p.copy.as<T>()[row * p.copy_stride + i] = state;
      }
    }
  });
}

void chain_step(const Context&, const ChainStepParams& p) {
  check_chain_step(p);
  for (int seq = 0; seq < p.num_seqs; ++seq) choose(p, seq);
}

}  // namespace cpmcu::cpu
