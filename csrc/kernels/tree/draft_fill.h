// Fill: a path from the context joins a draft. The context is the text so far: history and root.
//
// The main path of a draft begins at the root and goes to the first child of each node. A drafter
// that orders its tokens by score writes the best child first. Let T_j be the context and the first
// j tokens of the main path, j < max_depth. An earlier place of T_j matches n tokens if the n
// tokens before it equal the last n tokens of T_j. The op takes the largest n in
// min_ngram..max_ngram over all j and places; then the smallest j; then the latest place. The
// tokens after the place continue the path of j tokens, up to max_depth tokens. If the text ends
// there, it repeats from the place on.
//
// The rate of matches of n tokens is the share of right tokens among the tokens behind them:
//
//   rate(n) = (hits[n] + 4 n / (n + 1)) / (trials[n] + 4)
//
// The score of a token on the context's path is the score of the token before it + log rate(n). n
// grows by one with each token. A token that the draft has already gets the larger of both scores.
// The filled draft is the M best tokens of draft and path, in the order of their scores. Ties go to
// the draft, then to the token that comes first. So a long match takes the place of the draft's
// tokens, and a short one takes what is left.
#pragma once

#include "kernels/tree/tree.h"

namespace cpmcu {

constexpr float kFillPrior = 4.0f;     // weight of the first guess of a rate, as a number of trials
constexpr float kFillTrials = 256.0f;  // hits and trials are halved when trials reach this number
// Log 0.7: score that each token of a draft without scores adds.
constexpr float kUnknownLogprob = -0.3566749f;

// The context's path of a slot, from the root on, for measuring the rates.
struct FillPath {
  int length = 0;      // lengths[slot] when the path was made
  int first = 0;       // j: number of the draft's tokens that the path begins with
  int match = 0;       // n: length of the match before token `first`
  int num_tokens = 0;  // 0: the context has no match, so there is no path
  int tokens[kMaxDraftDepth] = {};
};

// hits and trials by n; n > kMaxNgram counts as kMaxNgram.
struct FillRates {
  float* hits = nullptr;    // [kMaxNgram + 1]
  float* trials = nullptr;  // [kMaxNgram + 1]
};

struct DraftFillParams {
  int num_seqs = 0;                // B
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;                 // history is required
  Draft draft;                     // maximum size: kMaxTreeSize - 1 tokens
  int max_depth = 0;               // D: maximum number of tokens on a path of the filled draft
  int min_ngram = 1;
  int max_ngram = 4;
  FillRates rates;
  FillPath* paths = nullptr;  // [slots] out
  Draft filled;               // out: M tokens for each sequence; unused ones are -1
};
REGISTER_OP(draft_fill, DraftFillParams)

// Compares the paths of the last step with the tokens that were accepted, and counts hits and
// trials. A path counts up to its first wrong token. It counts only if the slot's last step was the
// one that the path was made for.
struct FillObserveParams {
  int num_seqs = 0;                // B
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;
  const FillPath* paths = nullptr;  // [slots]
  FillRates rates;                  // updated in place
};
REGISTER_OP(fill_observe, FillObserveParams)

inline void check_fill(const DraftFillParams& p) {
  CHECK(p.min_ngram >= 1 && p.min_ngram <= p.max_ngram && p.max_ngram <= kMaxNgram,
        "draft_fill: matches of {} to {} tokens, expected 1 to {}", p.min_ngram, p.max_ngram,
        kMaxNgram);
  CHECK(p.max_depth >= 1 && p.max_depth <= kMaxDraftDepth,
        "draft_fill: paths of up to {} tokens, expected 1 to {}", p.max_depth, kMaxDraftDepth);
  CHECK(p.draft.num_tokens >= 1 && p.draft.num_tokens < kMaxTreeSize && p.filled.num_tokens >= 1 &&
            p.filled.num_tokens < kMaxTreeSize,
        "draft_fill: a draft of {} tokens becomes one of {}, expected 1 to {}", p.draft.num_tokens,
        p.filled.num_tokens, kMaxTreeSize - 1);
  CHECK(p.slots.history != nullptr, "draft_fill: no history is given");
}

}  // namespace cpmcu
