// Checks of the parameters of the lattice ops, for the CPU and CUDA implementations.
#pragma once

#include "kernels/tree/lattice.h"

namespace cpmcu {

inline void check_block_rows(const BlockRowsParams& p) {
  CHECK(p.num_seqs >= 0 && p.num_rows >= 1 && p.num_rows <= kMaxTreeSize,
        "block_rows: {} sequences of {} rows, expected 1 to {} rows", p.num_seqs, p.num_rows,
        kMaxTreeSize);
}

inline void check_pair_scores(const PairScoresParams& p) {
  CHECK(p.block.topk >= 1 && p.block.topk <= kMaxTopk && p.block.depth >= 1 &&
            p.block.depth <= kMaxDraftDepth && p.block.num_seqs >= 0,
        "pair_scores: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}",
        p.block.topk, p.block.depth, p.block.num_seqs, kMaxTopk, kMaxDraftDepth);
  const int64_t rank = p.predecessors.size(1);
  CHECK(rank >= 1 && p.successors.size(1) == rank && p.successors.dtype() == p.predecessors.dtype(),
        "pair_scores: codebooks are {} {} and {} {}, expected one dtype and equally many columns",
        name_of(p.predecessors.dtype()), p.predecessors.shape_text(), name_of(p.successors.dtype()),
        p.successors.shape_text());
  CHECK(p.gates.empty() || (p.gates.dtype() == p.predecessors.dtype() && p.gates.size(1) == rank &&
                            p.gates.size(0) == int64_t{p.block.num_seqs} * p.block.depth),
        "pair_scores: gates are {} {}, expected {} [{}, {}]", name_of(p.gates.dtype()),
        p.gates.shape_text(), name_of(p.predecessors.dtype()), p.block.num_seqs * p.block.depth,
        rank);
  const Tensor& more = p.predecessor_gates;
  CHECK(more.empty() || (!p.gates.empty() && more.dtype() == p.predecessors.dtype() &&
                         more.size(0) == p.predecessors.size(0) && more.size(1) == rank),
        "pair_scores: predecessor_gates are {} {}, expected gates, and the dtype and shape of the "
        "predecessors, {} {}",
        name_of(more.dtype()), more.shape_text(), name_of(p.predecessors.dtype()),
        p.predecessors.shape_text());
}

inline void check_lattice_tree(const LatticeTreeParams& p) {
  const Lattice& lattice = p.lattice;
  CHECK(lattice.topk >= 1 && lattice.topk <= kMaxTopk && lattice.depth >= 1 &&
            lattice.depth <= kMaxDraftDepth && lattice.num_seqs >= 0,
        "lattice_tree: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}",
        lattice.topk, lattice.depth, lattice.num_seqs, kMaxTopk, kMaxDraftDepth);
  CHECK(p.depth >= 1 && p.depth <= lattice.depth,
        "lattice_tree: paths of {} tokens, expected 1 to the depth of the lattice, {}", p.depth,
        lattice.depth);
  CHECK((lattice.scores == nullptr) != (lattice.pairs == nullptr),
        "lattice_tree: scores and pairs are {}, expected one of them",
        lattice.scores == nullptr ? "both missing" : "both given");
  CHECK(p.draft.num_tokens >= 0 && p.draft.num_tokens < kMaxTreeSize,
        "lattice_tree: a draft of {} tokens, expected at most {}", p.draft.num_tokens,
        kMaxTreeSize - 1);
  CHECK(p.off_path <= 0, "lattice_tree: off_path is {}, expected at most 0", p.off_path);
}

}  // namespace cpmcu
