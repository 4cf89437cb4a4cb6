// Token trees on the device: growth, selection, verification.
//
// Dynamic trees as in EAGLE-2 (Li et al., arXiv:2406.16858): the draft's k best continuations of
// each of the k best nodes of a level are candidates; at the end the N - 1 best candidates of all
// levels by cumulative log-probability, and the root, are the tree. All sums in float32; ties go to
// the lower candidate index, so a parent always precedes its children.
//
// Candidates of a sequence are numbered: 0..k-1 the first level (continuations of the root), then
// for level s = 1..D-1: k + (s - 1) k^2 + r k + c, the c-th continuation of row r of the level
// before.
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

// A tree for each of B sequences, and the rows that verify it. Node 0 is the root: the token
// emitted but not cached. Unused nodes hold token -1 and hang below the root. Node i of sequence b
// is row b N + i, at position lengths[slot] + depth.
struct TokenTrees {
  int num_seqs = 0;                // B
  int num_nodes = 0;               // N, root included
  int* tokens = nullptr;           // [B, N]
  int* parents = nullptr;          // [B, N]; of the root: -1
  int* depths = nullptr;           // [B, N]
  uint64_t* masks = nullptr;       // [B, N] ancestors and self
  int* token_ids = nullptr;        // [B, N] the tokens; of unused nodes 0
  int* token_positions = nullptr;  // [B, N]
  int* token_slots = nullptr;      // [B, N]
  int* token_seqs = nullptr;       // [B, N]
  int* seq_token_begin = nullptr;  // [B + 1]
};

// The k largest log-probabilities (float32 log-softmax of the row) of each row and their tokens,
// best first, ties to the lower id. NaN counts as -inf.
struct TopkLogprobsParams {
  Tensor logits;                // [R, V] float32
  int topk = 0;                 // k <= kMaxTopk
  const int* id_map = nullptr;  // [V] draft id -> target id, or null
  int* tokens = nullptr;        // [R, k] out, mapped
  float* logprobs = nullptr;    // [R, k] out
};
REGISTER_OP(topk_logprobs, TopkLogprobsParams)

// What growth remembers of each sequence, and the k rows that the draft runs next.
struct DraftBeam {
  int num_seqs = 0;                    // B
  int topk = 0;                        // k
  int depth = 0;                       // D levels; k (D - 1) <= 64
  float* scores = nullptr;             // [B, num_candidates] cumulative log-probability
  int* tokens = nullptr;               // [B, num_candidates]
  int* level_candidates = nullptr;     // [B, D, k] candidate that row r of level s is
  float* token_scores = nullptr;       // [B, k] of the current level's rows
  uint64_t* ancestor_masks = nullptr;  // [B, k] bit (s k + r): row r of level s
  int* token_ids = nullptr;            // [B, k] their tokens
  int* token_parents = nullptr;    // [B, k] index into the draft's last rows of each row's parent
  int* token_positions = nullptr;  // [B, k] draft length + level
  int* token_seqs = nullptr;       // [B, k]
  int* seq_token_begin = nullptr;  // [B + 1]
};

// Adds level `level` from the top-k of the draft's last rows (level 0: one row a sequence; later:
// k) and chooses the rows of the next draft step: at level 0 all k candidates, later the k best of
// k^2. token_parents: level 0: the sequence b; later: b k + r. At level 0 the draft has caught up:
// draft_lengths[slot] += max(accepted counts[slot], 1).
struct TreeExpandParams {
  DraftBeam beam;
  int level = 0;
  const int* topk_tokens = nullptr;      // [B * rows, k]
  const float* topk_logprobs = nullptr;  // [B * rows, k]
  const int* seq_slots = nullptr;        // [B]
  const int* accepted_counts = nullptr;  // [slots]
  int* draft_lengths = nullptr;          // [slots]
};
REGISTER_OP(tree_expand, TreeExpandParams)

// A draft: the nodes of each sequence's tree below the root, parents before their children.
struct Draft {
  int num_tokens = 0;       // M of each sequence
  int* tokens = nullptr;    // [B, M]; -1: unused, and so is what hangs below it
  int* parents = nullptr;   // [B, M] node: 0 the root, i + 1 token i. Null: a chain
  float* scores = nullptr;  // [B, M] log-probability of the path down to it. Null: not known
};

// The draft of all candidates: the M best. M <= num_candidates.
struct DraftSelectParams {
  DraftBeam beam;
  Draft draft;  // out; of beam.num_seqs sequences
};
REGISTER_OP(draft_select, DraftSelectParams)

// Makes trees of drafts, M < N. Without a draft (M = 0) each tree is its root.
struct TreeBuildParams {
  Draft draft;
  TokenTrees trees;                // out
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;                 // next_tokens are the roots
};
REGISTER_OP(tree_build, TreeBuildParams)

constexpr int kMaxStopIds = 16;

// When a sequence ends on the device.
struct SlotStop {
  int stop_ids[kMaxStopIds] = {};  // end after emitting one of them
  int num_stop_ids = 0;
  int max_tokens = 0;  // tokens still to emit; counts down
  int finished = 0;
};

// Walks each tree from the root: at a node take the token drawn there; it is emitted; if a child of
// the node holds it, go there, else stop (target-match acceptance). The walk ends early after a
// stop id, the last token allowed, or kNoToken, which is emitted too but not counted. Then, of the
// slot: lengths += emitted, next_tokens = last emitted, history, counts (if it uses penalties),
// accepted, stop.max_tokens, stop.finished. Result b of the step is that of sequence b. A slot that
// is finished emits nothing: its accepted count is 0, nothing else of it changes.
struct AcceptTreeParams {
  TokenTrees trees;
  const int* drawn = nullptr;               // [B N] token drawn at each node
  const TokenLogprobs* logprobs = nullptr;  // [B N]
  const int* seq_slots = nullptr;           // [B]
  const SlotSampling* sampling = nullptr;   // [slots]
  SlotState state;
  SlotStop* stops = nullptr;  // [slots]
  ResultSink sink;
};
REGISTER_OP(accept_tree, AcceptTreeParams)

// Moves what accepted nodes leave into place. Of planes with a row for each token: row L + paths[j]
// to row L + j, j = 1 .. counts - 1, where L = lengths - counts (rows in place stay). Of hidden
// states that a drafter reads: row b N + paths[j] to accepted_hidden row slot (D + 1) + j.
struct KeepAcceptedParams {
  Tensor pool{};      // [planes, pages, heads * 64 * width], or empty
  int num_heads = 0;  // of a page
  int width = 0;
  const int* page_table = nullptr;  // [slots, max_pages]
  int max_pages = 0;
  int num_seqs = 0;
  int num_nodes = 0;               // N
  const int* seq_slots = nullptr;  // [B]
  const int* lengths = nullptr;    // [slots], after acceptance
  Accepted accepted;
  Tensor hidden{};           // [B N, F], or empty
  Tensor accepted_hidden{};  // [slots (D + 1), F]
};
REGISTER_OP(keep_accepted, KeepAcceptedParams)

// Rows with which a draft catches up: row j of sequence b is accepted id j, rows from counts[slot]
// on are padding (their keys are overwritten later, no row before them sees them). With n =
// max(counts[slot], 1) the draft has draft_lengths[slot] = lengths[slot] - n tokens before, one
// more if it is not shifted; row j is at position draft_lengths[slot] + j.
struct BeginDraftParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  const int* lengths = nullptr;  // [slots] tokens that the target has cached
  Accepted accepted;
  bool shifted = false;            // row t of the draft holds the id of token t + 1
  int* draft_lengths = nullptr;    // [slots] out
  int* ids = nullptr;              // [B, D + 1] out
  int* positions = nullptr;        // [B, D + 1] out
  int* token_seqs = nullptr;       // [B, D + 1] out
  int* hidden_rows = nullptr;      // [B, D + 1] out: slot (D + 1) + j
  int* seq_token_begin = nullptr;  // [B + 1] out
  int* last_rows = nullptr;        // [B] out: b (D + 1) + n - 1
};
REGISTER_OP(begin_draft, BeginDraftParams)

// Rows of a shifted draft for a prompt chunk, in two launches. Row t of the draft holds the hidden
// state of token t and the id of token t + 1. So the first id of a chunk belongs to the last token
// of the chunk before: launch one has this row of each sequence, launch two the others.
// A chunk that begins a prompt has no such row: its row of launch one is overwritten by launch two.
struct ShiftPromptParams {
  int num_seqs = 0;                      // B
  int num_tokens = 0;                    // T
  int max_path = 0;                      // D + 1
  const int* ids = nullptr;              // [T]
  const int* token_seqs = nullptr;       // [T]
  const int* seq_slots = nullptr;        // [B]
  const int* seq_token_begin = nullptr;  // [B + 1]
  const int* lengths = nullptr;          // [slots] tokens cached before the chunk
  struct Rows {
    int* ids = nullptr;              // [T]
    int* positions = nullptr;        // [T]
    int* token_seqs = nullptr;       // [T]
    int* hidden_rows = nullptr;      // [T]
    int* seq_token_begin = nullptr;  // [B + 1]
  };
  // B rows; hidden_rows: slot (D + 1) in accepted_hidden.
  Rows first;
  int* first_lengths = nullptr;  // [slots] tokens that the draft has cached before them
  // T - B rows, before which the draft has cached `lengths`; hidden_rows: of the chunk.
  Rows rest;
};
REGISTER_OP(shift_prompt, ShiftPromptParams)

// Prompt look-up (Saxena 2023): the tokens after the latest earlier occurrence of the last n tokens
// of history + root + already drafted chain, n from max_ngram down to min_ngram, none found: -1.
// Writes chain[b, first .. num_tokens) and reads chain[b, 0 .. first) as drafted by someone else.
struct NgramLookupParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  const int* history = nullptr;  // [slots, max_len] tokens cached so far
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
