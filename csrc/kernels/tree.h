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
#include "kernels/sample.h"
#include "kernels/step_ops.h"
#include "kernels/step_rows.h"

namespace cpmcu {

constexpr int kMaxTopk = 32;
constexpr int kMaxDraftDepth = 16;
constexpr int kMaxNgram = 32;

constexpr int num_candidates(int topk, int depth) { return topk + (depth - 1) * topk * topk; }

// A tree for each of B sequences, and the rows that verify it. Node 0 is the root: the token
// emitted but not cached. Unused nodes hold token -1 and hang below the root. Node i of sequence b
// is row b N + i, at position lengths[slot] + depth.
struct TokenTrees {
  int num_seqs = 0;              // B
  int num_nodes = 0;             // N, root included
  int* tokens = nullptr;         // [B, N]
  int* parents = nullptr;        // [B, N]; of the root: -1
  int* depths = nullptr;         // [B, N]
  uint64_t* masks = nullptr;     // [B, N] ancestors and self
  int* row_ids = nullptr;        // [B, N] the tokens; of unused nodes 0
  int* row_positions = nullptr;  // [B, N]
  int* row_slots = nullptr;      // [B, N]
  int* row_seqs = nullptr;       // [B, N]
  int* seq_row_begin = nullptr;  // [B + 1]
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
  int num_seqs = 0;                 // B
  int topk = 0;                     // k
  int depth = 0;                    // D levels; k (D - 1) <= 64
  float* scores = nullptr;          // [B, num_candidates] cumulative log-probability
  int* tokens = nullptr;            // [B, num_candidates]
  int* level_candidates = nullptr;  // [B, D, k] candidate that row r of level s is
  float* row_scores = nullptr;      // [B, k] of the current level's rows
  uint64_t* row_masks = nullptr;    // [B, k] bit (s k + r): row r of level s
  int* row_ids = nullptr;           // [B, k] their tokens
  int* row_parents = nullptr;       // [B, k] index into the draft's last rows of each row's parent
  int* row_positions = nullptr;     // [B, k] draft length + level
  int* row_seqs = nullptr;          // [B, k]
  int* seq_row_begin = nullptr;     // [B + 1]
};

// Adds level `level` from the top-k of the draft's last rows (level 0: one row a sequence; later:
// k) and chooses the rows of the next draft step: at level 0 all k candidates, later the k best of
// k^2. row_parents: level 0: the sequence b; later: b k + r. At level 0 the draft has caught up:
// draft_lengths[slot] += pending_counts[slot], pending_counts[slot] = 0.
struct TreeExpandParams {
  DraftBeam beam;
  int level = 0;
  const int* topk_tokens = nullptr;      // [B * rows, k]
  const float* topk_logprobs = nullptr;  // [B * rows, k]
  const int* seq_slots = nullptr;        // [B]
  int* pending_counts = nullptr;         // [slots]
  int* draft_lengths = nullptr;          // [slots]
};
REGISTER_OP(tree_expand, TreeExpandParams)

// Chooses the tree from all candidates. N - 1 <= num_candidates.
struct TreeBuildParams {
  DraftBeam beam;
  TokenTrees trees;
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;                 // next_tokens are the roots
};
REGISTER_OP(tree_build, TreeBuildParams)

// A chain drafted token by token, as a tree of width one: tokens [B, N - 1], -1 from where it ends.
struct ChainBuildParams {
  const int* chain = nullptr;  // [B, N - 1]
  TokenTrees trees;
  const int* seq_slots = nullptr;  // [B]
  SlotState slots;                 // next_tokens are the roots
};
REGISTER_OP(chain_build, ChainBuildParams)

constexpr int kMaxStopIds = 16;

// When a sequence ends on the device.
struct SlotStop {
  int stop_ids[kMaxStopIds] = {};  // end after emitting one of them
  int num_stop_ids = 0;
  int max_tokens = 0;  // tokens still to emit; counts down
  int finished = 0;
};

// Walks each tree from the root: at a node take the token drawn there; it is emitted; if a child of
// the node holds it, go there, else stop (target-match acceptance). The run ends early after a stop
// id, the last token allowed, or kNoToken, which is emitted too but not counted. Then, of the slot:
// lengths += emitted, next_tokens = last emitted, counts (if it uses penalties), stop.max_tokens,
// stop.finished; and the result is published as finish_step does (step_ops.h): results[b] of the
// ring entry for every sequence, in order. A slot that is finished already emits nothing and
// changes nothing.
//
// paths[b, j] = node of the j-th step of the walk (-1 beyond). For the drafter: pending_ids[slot,
// j] = j-th emitted token, pending_counts[slot] = emitted.
struct AcceptTreeParams {
  TokenTrees trees;
  int max_emitted = 0;                      // D + 1: longest path plus one
  const int* drawn = nullptr;               // [B N] token drawn at each node
  const TokenLogprobs* logprobs = nullptr;  // [B N]
  const int* seq_slots = nullptr;           // [B]
  const SlotSampling* sampling = nullptr;   // [slots]
  SlotState state;
  SlotStop* stops = nullptr;      // [slots]
  int* paths = nullptr;           // [B, D + 1] out
  int* num_emitted = nullptr;     // [B] out
  int* pending_ids = nullptr;     // [slots, D + 1] out
  int* pending_counts = nullptr;  // [slots] out
  SlotResult* results = nullptr;  // mapped host memory, [ring_size, max_seqs]
  int ring_size = 1;
  int max_seqs = 1;
  uint64_t* ticket = nullptr;
  volatile uint64_t* done = nullptr;
};
REGISTER_OP(accept_tree, AcceptTreeParams)

// Moves what the accepted nodes leave into place: their keys and values, in all layers, from cell
// L + paths[b, j] to L + j, j = 1..num_emitted - 1, where L = lengths[slot] - num_emitted (cells in
// place already stay); and their features, if the drafter wants them, from row b N + paths[b, j] to
// pending_features[slot (D + 1) + j], j = 0..num_emitted - 1.
struct KeepAcceptedParams {
  Tensor pool;  // [layers * 2, pages, Hkv * 64 * D]: keys and values of every layer
  int num_kv_heads = 0;
  int head_dim = 0;
  const int* page_table = nullptr;  // [slots, max_pages]
  int max_pages = 0;
  int num_seqs = 0;
  int num_nodes = 0;                 // N
  int max_emitted = 0;               // D + 1
  const int* seq_slots = nullptr;    // [B]
  const int* lengths = nullptr;      // [slots], after acceptance
  const int* paths = nullptr;        // [B, D + 1]
  const int* num_emitted = nullptr;  // [B]
  Tensor features;                   // [B N, F], or empty
  Tensor pending_features;           // [slots (D + 1), F]
};
REGISTER_OP(keep_accepted, KeepAcceptedParams)

// Rows with which a draft catches up: row j of sequence b is id pending_ids[slot, j] at position
// draft_lengths[slot] + j; rows from pending_counts[slot] on are padding (their keys are
// overwritten later, no row before them sees them). last_rows[b] = b (D + 1) + pending_counts[slot]
// - 1 (0 rows: the first row).
struct BeginDraftParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  int max_pending = 0;  // D + 1
  const int* pending_ids = nullptr;
  const int* pending_counts = nullptr;
  const int* draft_lengths = nullptr;  // [slots]
  int* ids = nullptr;                  // [B, D + 1] out
  int* positions = nullptr;            // [B, D + 1] out
  int* row_seqs = nullptr;             // [B, D + 1] out
  int* feature_rows = nullptr;         // [B, D + 1] out: slot (D + 1) + j
  int* seq_row_begin = nullptr;        // [B + 1] out
  int* last_rows = nullptr;            // [B] out
};
REGISTER_OP(begin_draft, BeginDraftParams)

// In place of catching up: draft_lengths[slot] += pending_counts[slot], pending_counts[slot] = 0.
struct SkipDraftParams {
  const int* seq_slots = nullptr;  // [B]
  int num_seqs = 0;
  int* pending_counts = nullptr;  // [slots]
  int* draft_lengths = nullptr;   // [slots]
};
REGISTER_OP(skip_draft, SkipDraftParams)

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
