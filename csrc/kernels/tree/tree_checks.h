// Checks of the parameters of the tree ops, for the CPU and CUDA implementations.
#pragma once

#include <string_view>

#include "kernels/tree/tree.h"

namespace cpmcu {

inline void check_trees(std::string_view op, const TokenTrees& trees) {
  CHECK(trees.num_seqs >= 0 && trees.num_nodes >= 1 && trees.num_nodes <= kMaxTreeSize,
        "{}: {} trees of {} nodes, expected 1 to {} nodes", op, trees.num_seqs, trees.num_nodes,
        kMaxTreeSize);
}

inline void check_beam(std::string_view op, const DraftBeam& beam) {
  CHECK(beam.topk >= 1 && beam.topk <= kMaxTopk && beam.depth >= 1 &&
            beam.depth <= kMaxDraftDepth && beam.num_seqs >= 0,
        "{}: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}", op,
        beam.topk, beam.depth, beam.num_seqs, kMaxTopk, kMaxDraftDepth);
  CHECK(
      beam.topk * (beam.depth - 1) <= kMaxTreeSize,
      "{}: top-k {} and depth {} make {} drafted tokens below the first level, expected at most {}",
      op, beam.topk, beam.depth, beam.topk * (beam.depth - 1), kMaxTreeSize);
}

inline void check_topk(const TopkLogprobsParams& p) {
  CHECK(p.logits.dtype() == DType::kF32 && p.logits.num_dims() == 2,
        "topk_logprobs: logits are {} {}, expected float32 [rows, vocabulary]",
        name_of(p.logits.dtype()), p.logits.shape_text());
  CHECK(p.topk >= 1 && p.topk <= kMaxTopk && p.topk <= p.logits.size(1),
        "topk_logprobs: top-k {} of {} tokens, expected 1 to {} and at most the number of tokens",
        p.topk, p.logits.size(1), kMaxTopk);
}

inline void check_expand(const TreeExpandParams& p) {
  check_beam("tree_expand", p.beam);
  CHECK(p.level >= 0 && p.level < p.beam.depth,
        "tree_expand: level {} of a depth of {}, expected 0 to depth - 1", p.level, p.beam.depth);
}

inline void check_select(const DraftSelectParams& p) {
  check_beam("draft_select", p.beam);
  CHECK(p.draft.num_tokens >= 0 && p.draft.num_tokens < kMaxTreeSize &&
            p.draft.num_tokens <= num_candidates(p.beam.topk, p.beam.depth),
        "draft_select: {} tokens of the {} candidates that top-k {} and depth {} make, expected at "
        "most {}",
        p.draft.num_tokens, num_candidates(p.beam.topk, p.beam.depth), p.beam.topk, p.beam.depth,
        kMaxTreeSize - 1);
}

inline void check_build(const TreeBuildParams& p) {
  check_trees("tree_build", p.trees);
  CHECK(p.draft.num_tokens >= 0 && p.draft.num_tokens < p.trees.num_nodes,
        "tree_build: a draft of {} tokens for trees of {} nodes, expected fewer tokens than nodes",
        p.draft.num_tokens, p.trees.num_nodes);
}

inline void check_accept(const AcceptTreeParams& p) {
  check_trees("accept_tree", p.trees);
  const int max_path = p.state.accepted.max_path;
  CHECK(max_path >= 1 && max_path <= kMaxTreeSize,
        "accept_tree: the longest path has {} tokens, expected 1 to {}", max_path, kMaxTreeSize);
  CHECK(p.verify_window >= 0, "accept_tree: verify_window is {}, expected at least 0",
        p.verify_window);
  CHECK(p.sink.step_counter == nullptr ||
            (p.sink.ring_size > 0 && p.trees.num_seqs <= p.sink.max_seqs),
        "accept_tree: results of {} sequences do not fit a ring of {} steps with {} results each",
        p.trees.num_seqs, p.sink.ring_size, p.sink.max_seqs);
}

inline void check_keep(const KeepAcceptedParams& p) {
  CHECK(p.pool.empty() || (p.pool.num_dims() == 3 && p.num_heads > 0 && p.width > 0 &&
                           p.pool.size(2) == int64_t{p.num_heads} * kPageSize * p.width),
        "keep_accepted: the pool is {}, expected pages of {} heads times {} entries times {} "
        "elements",
        p.pool.shape_text(), p.num_heads, kPageSize, p.width);
  CHECK(
      p.hidden.empty() || (p.hidden.dtype() == p.accepted_hidden.dtype() &&
                           p.hidden.size(1) == p.accepted_hidden.size(1)),
      "keep_accepted: hidden is {} {}, accepted_hidden is {} {}, expected the same dtype and width",
      name_of(p.hidden.dtype()), p.hidden.shape_text(), name_of(p.accepted_hidden.dtype()),
      p.accepted_hidden.shape_text());
}

inline void check_ngram(const NgramLookupParams& p) {
  CHECK(p.min_ngram >= 1 && p.min_ngram <= p.max_ngram && p.max_ngram <= kMaxNgram,
        "ngram_lookup: n-grams of {} to {} tokens, expected an ascending range within 1 to {}",
        p.min_ngram, p.max_ngram, kMaxNgram);
  CHECK(p.first >= 0 && p.first <= p.num_tokens,
        "ngram_lookup: a chain of {} tokens, of which {} are given, expected 0 to all",
        p.num_tokens, p.first);
}

}  // namespace cpmcu
