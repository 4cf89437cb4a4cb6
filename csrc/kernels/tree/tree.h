// Token trees on the device: growth, selection, verification.
//
// Dynamic trees as in EAGLE-2 (Li et al., arXiv:2406.16858). Each level has k nodes that the draft
// model runs. The k best continuations of each node are candidates. The k best candidates are the
// nodes of the next level. After D levels, the root and the N - 1 best candidates of all levels
// form the tree.
//
// The score of a candidate is its cumulative log-probability, summed in float32. If two scores are
// equal, the lower candidate index wins. Therefore a parent always precedes its children.
//
//   level       candidate index            meaning
//   0           c                          c-th continuation of the root, c < k
//   s = 1..D-1  k + (s - 1) k^2 + r k + c  c-th continuation of node r of level s - 1
#pragma once

#include "kernels/op.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/step_ops.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

constexpr int kMaxTopk = 32;
constexpr int kMaxDraftDepth = 16;
constexpr int kMaxNgram = 32;

constexpr int num_candidates(int topk, int depth) { return topk + (depth - 1) * topk * topk; }

// One tree for each of B sequences, and the step that verifies the trees. Node 0 is the root: the
// last emitted token, which is not cached yet. An unused node has token -1 and the root as parent.
// Node i of sequence b is token b N + i of the step, at position lengths[slot] + depth.
struct TokenTrees {
  int num_seqs = 0;                // B
  int num_nodes = 0;               // N, including the root
  int* tokens = nullptr;           // [B, N]
  int* parents = nullptr;          // [B, N]; -1 for the root
  int* depths = nullptr;           // [B, N]
  uint64_t* masks = nullptr;       // [B, N] bit i: node i is an ancestor or the node itself
  int* token_ids = nullptr;        // [B, N]: like `tokens`, but unused nodes have 0
  int* token_positions = nullptr;  // [B, N]: lengths[slot] + depth
  int* token_slots = nullptr;      // [B, N]
  int* token_seqs = nullptr;       // [B, N]
  int* seq_token_begin = nullptr;  // [B + 1]
};

// The k largest log-probabilities of each row (float32 log-softmax) and their tokens, in descending
// order. If two are equal, the lower id comes first. NaN counts as -inf.
struct TopkLogprobsParams {
  Tensor logits;                // [R, V] float32
  int topk = 0;                 // k <= kMaxTopk
  const int* id_map = nullptr;  // [V] draft id -> target id; null: the ids are equal
  int* tokens = nullptr;        // [R, k] out, target ids
  float* logprobs = nullptr;    // [R, k] out
};
REGISTER_OP(topk_logprobs, TopkLogprobsParams)

// State of the growth of each sequence's tree, and the k nodes that the draft model runs next.
struct DraftBeam {
  int num_seqs = 0;                    // B
  int topk = 0;                        // k
  int depth = 0;                       // D: number of levels; k (D - 1) <= 64
  float* scores = nullptr;             // [B, num_candidates] cumulative log-probabilities
  int* tokens = nullptr;               // [B, num_candidates]
  int* level_candidates = nullptr;     // [B, D, k]: candidate number of node r of level s
  float* token_scores = nullptr;       // [B, k] scores of the current level's nodes
  uint64_t* ancestor_masks = nullptr;  // [B, k] bit s k + r: node r of level s
  int* token_ids = nullptr;            // [B, k] tokens of the current level's nodes
  int* token_parents = nullptr;    // [B, k]: row of the node's parent in the draft's last launch
  int* token_positions = nullptr;  // [B, k]: draft_lengths[slot] + level
  int* token_seqs = nullptr;       // [B, k]
  int* seq_token_begin = nullptr;  // [B + 1]
};

// Adds level `level` to the beam and chooses the k nodes of the next draft launch. The top-k of the
// previous draft launch are the candidates. A sequence has R rows in that launch.
//
//   level     R  new candidates  chosen nodes  token_parents
//   0         1  k               all k         b
//   1..D - 1  k  k^2             the k best    b k + r
//
// Level 0 follows the launch that processed the accepted tokens. Level 0 therefore adds
// max(accepted_counts[slot], 1) to draft_lengths[slot].
struct TreeExpandParams {
  DraftBeam beam;
  int level = 0;
  const int* topk_tokens = nullptr;      // [B R, k]
  const float* topk_logprobs = nullptr;  // [B R, k]
  const int* seq_slots = nullptr;        // [B]
  const int* accepted_counts = nullptr;  // [slots]
  int* draft_lengths = nullptr;          // [slots]
};
REGISTER_OP(tree_expand, TreeExpandParams)

// A draft: the nodes of each sequence's tree without the root. Parents precede their children.
struct Draft {
  int num_tokens = 0;     // M: number of tokens of each sequence's draft
  int* tokens = nullptr;  // [B, M]; -1: the node and its descendants are unused
  // [B, M]: number of the parent node. 0 is the root, i + 1 is token i. Null: a chain.
  int* parents = nullptr;
  // [B, M] log-probability of the path from the root; null: the scores are unknown.
  float* scores = nullptr;
};

// Selects the M best candidates of all levels as the draft. M <= num_candidates.
struct DraftSelectParams {
  DraftBeam beam;
  Draft draft;  // out: a draft for each of beam.num_seqs sequences
};
REGISTER_OP(draft_select, DraftSelectParams)

// Builds trees from drafts, M < N. If M = 0, each tree is only its root.
struct TreeBuildParams {
  Draft draft;
  TokenTrees trees;                // out
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;                 // next_tokens gives the roots
};
REGISTER_OP(tree_build, TreeBuildParams)

constexpr int kMaxStopIds = 16;

// The conditions that end a sequence on the device.
struct SlotStop {
  // The first num_stop_ids are valid: the sequence ends after one of them.
  int stop_ids[kMaxStopIds] = {};
  int num_stop_ids = 0;
  int max_tokens = 0;  // number of tokens that the sequence may still emit
  int finished = 0;
};

// Accepts a path of each tree by target match. The walk starts at the root. At each node it emits
// the token drawn there. If a child of the node has this token, the walk continues at the child;
// otherwise it ends. The walk also ends after a stop id, after the last allowed token, and after
// kNoToken. kNoToken is emitted but never counted.
//
// If `candidates` is given, the walk accepts more (top-p verification, which changes the text). The
// walk emits the token of a child and continues there. It takes the first child that exists of:
//
//   1. the child that has the drawn token
//   2. the child whose token is the most likely candidate that passes the filters
//   3. the child that has the second candidate, if `verify_window` nodes below it follow each other
//      and each has its parent's first candidate
//
// Without such a child, the drawn token is emitted and the walk ends.
//
// The walk then updates the slot: lengths += number of emitted tokens, next_tokens = last emitted
// token, history, accepted, stop.max_tokens, stop.finished, and counts if the slot uses penalties.
// Result b of the step belongs to sequence b.
//
// If the slot is finished already, no token is emitted: its accepted count becomes 0 and the rest
// of its state stays unchanged.
struct AcceptTreeParams {
  TokenTrees trees;
  const int* drawn = nullptr;                   // [B N] the token drawn at each node
  const TokenLogprobs* logprobs = nullptr;      // [B N]
  const int* seq_slots = nullptr;               // [B]
  const SlotSampling* sampling = nullptr;       // [slots]
  const TokenCandidates* candidates = nullptr;  // [B N]; null: acceptance by target match
  int verify_window = 0;
  SlotState state;
  SlotStop* stops = nullptr;  // [slots]
  // [B] speculative steps that the drafts took themselves, published with the results. Null: none.
  const InnerCounts* inner = nullptr;
  ResultSink sink;
};
REGISTER_OP(accept_tree, AcceptTreeParams)

// Moves the entries and hidden states of accepted nodes to their final places. With
// L = lengths - counts:
//
//   data           from            to                                       j
//   entries        L + paths[j]    L + j                                    1 .. counts - 1
//   hidden states  b N + paths[j]  Accepted::hidden_row(slot, L + j)        0 .. counts - 1
struct KeepAcceptedParams {
  Tensor pool{};                    // [planes, pages, heads * 64 * width]; empty: no entries move
  int num_heads = 0;                // number of heads in a page
  int width = 0;                    // elements in the entry of one head
  const int* page_table = nullptr;  // [slots, max_pages]
  int max_pages = 0;
  int num_seqs = 0;
  int num_nodes = 0;               // N
  const int* seq_slots = nullptr;  // [B]
  const int* lengths = nullptr;    // [slots] lengths after the acceptance
  Accepted accepted;
  Tensor hidden{};           // [B N, F]; empty: no hidden states move
  Tensor accepted_hidden{};  // [slots (D + 1), F]
};
REGISTER_OP(keep_accepted, KeepAcceptedParams)

// Prepares the draft launch that processes the accepted tokens. Every sequence has D + 1 tokens in
// this launch. Token j is accepted id j at position draft_lengths[slot] + j. Tokens from
// counts[slot] on are padding: no earlier token sees them, and later launches overwrite their KV
// entries.
//
// Let n = max(counts[slot], 1). draft_lengths[slot] is lengths[slot] - n if the draft is shifted,
// and lengths[slot] - n + 1 otherwise.
struct BeginDraftParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  const int* lengths = nullptr;  // [slots]: tokens in the target's cache
  Accepted accepted;
  // Entry t of the draft combines token t's hidden state with the id of token t + 1.
  bool shifted = false;
  int* draft_lengths = nullptr;    // [slots] out: tokens in the draft's cache
  int* ids = nullptr;              // [B, D + 1] out
  int* positions = nullptr;        // [B, D + 1] out
  int* token_seqs = nullptr;       // [B, D + 1] out
  int* hidden_rows = nullptr;      // [B, D + 1] out: rows of accepted_hidden
  int* seq_token_begin = nullptr;  // [B + 1] out
  int* last_rows = nullptr;        // [B] out: b (D + 1) + n - 1, the row of the last accepted token
};
REGISTER_OP(begin_draft, BeginDraftParams)

// Prepares the two launches of a shifted draft for a prompt chunk. Entry t of a shifted draft takes
// the hidden state of token t and the id of token t + 1. Therefore the first id of a chunk belongs
// to the last token of the chunk before.
//
//   launch  tokens of a sequence                  hidden states
//   first   1: the last token of the chunk before accepted_hidden, Accepted::hidden_row
//   rest    all tokens of the chunk but its last  the chunk's
//
// If the chunk begins a prompt or follows shared pages, the sequence has no chunk before it. The
// launch `first` then writes the entry that `rest` or a later step overwrites, never a shared page.
struct ShiftPromptParams {
  int num_seqs = 0;                      // B
  int num_tokens = 0;                    // T
  int max_path = 0;                      // D + 1
  const int* ids = nullptr;              // [T]
  const int* token_seqs = nullptr;       // [T]
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1]
  const int* lengths = nullptr;          // [slots]: tokens in the target's cache before the chunk
  const int* num_shared = nullptr;       // [slots], as in SlotState; null: no pages are shared
  struct Launch {
    int* ids = nullptr;              // [T]
    int* positions = nullptr;        // [T]
    int* token_seqs = nullptr;       // [T]
    int* hidden_rows = nullptr;      // [T]
    int* seq_token_begin = nullptr;  // [B + 1]
  };
  Launch first;                  // out: B tokens
  int* first_lengths = nullptr;  // [slots] out: tokens in the draft's cache before `first`
  // Out: T - B tokens. Before them, `lengths` tokens are in the draft's cache.
  Launch rest;
};
REGISTER_OP(shift_prompt, ShiftPromptParams)

// Prompt look-up (Saxena 2023). The text is history, root, and chain[b, 0 .. first), which another
// drafter wrote. The op looks for the last n tokens of the text at an earlier place, with the
// largest n in min_ngram..max_ngram. If several places match, the latest is taken. The tokens after
// this place become chain[b, first .. num_tokens). If no place matches, they are -1.
struct NgramLookupParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  const int* history = nullptr;  // [slots, max_len]: the cached tokens
  int max_len = 0;
  const int* lengths = nullptr;      // [slots]
  const int* next_tokens = nullptr;  // [slots]
  int min_ngram = 1;
  int max_ngram = 4;
  int* chain = nullptr;  // [B, num_tokens]
  int first = 0;
  int num_tokens = 0;
};
REGISTER_OP(ngram_lookup, NgramLookupParams)

}  // namespace cpmcu
