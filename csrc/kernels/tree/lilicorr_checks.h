// Checks of the parameters of the ops of a LiLiCorr head, for the CPU and CUDA implementations.
#pragma once

#include "kernels/tree/lilicorr.h"

namespace cpmcu {

inline void check_lattice_size(const char* op, const LatticeSize& size) {
  CHECK(size.topk >= 1 && size.topk <= kMaxLatticeTopk && size.depth >= 1 &&
            size.depth <= kMaxDraftDepth && size.num_seqs >= 0,
        "{}: top-k {}, depth {}, {} sequences; expected top-k 1 to {} and depth 1 to {}", op,
        size.topk, size.depth, size.num_seqs, kMaxLatticeTopk, kMaxDraftDepth);
}

// Requires a matrix of this shape and of the dtype of `like`.
inline void check_matrix(const char* op, const char* name, const Tensor& x, int64_t num_rows,
                         int64_t width, const Tensor& like) {
  CHECK(
      x.num_dims() == 2 && x.size(0) == num_rows && x.size(1) == width && x.dtype() == like.dtype(),
      "{}: {} is {} {}, expected {} [{}, {}]", op, name, name_of(x.dtype()), x.shape_text(),
      name_of(like.dtype()), num_rows, width);
}
// Requires `count` elements of the dtype of `like`.
inline void check_elements(const char* op, const char* name, const Tensor& x, int64_t count,
                           const Tensor& like) {
  CHECK(x.num_elements() == count && x.dtype() == like.dtype(),
        "{}: {} is {} {}, expected {} of {} elements", op, name, name_of(x.dtype()), x.shape_text(),
        name_of(like.dtype()), count);
}

inline void check_candidate_features(const CandidateFeaturesParams& p) {
  const char* op = "candidate_features";
  check_lattice_size(op, p.size);
  const int64_t width = p.out.size(1);
  check_matrix(op, "out", p.out, p.size.rows(), width, p.out);
  check_matrix(op, "weight", p.weight, width, kCandidateFeatures, p.out);
  check_elements(op, "bias", p.bias, width, p.out);
  check_elements(op, "norm_weight", p.norm_weight, kCandidateFeatures, p.out);
  check_elements(op, "norm_bias", p.norm_bias, kCandidateFeatures, p.out);
}

inline void check_candidate_states(const CandidateStatesParams& p) {
  const char* op = "candidate_states";
  check_lattice_size(op, p.size);
  const int64_t width = p.x.size(1);
  check_matrix(op, "x", p.x, p.size.rows(), width, p.x);
  check_matrix(op, "hidden", p.hidden, p.size.positions(), width, p.x);
  check_matrix(op, "slots", p.slots, p.slots.size(0), width, p.x);
  check_matrix(op, "ranks", p.ranks, p.size.topk, width, p.x);
  check_matrix(op, "biases", p.biases, p.biases.size(0), width, p.x);
  CHECK(p.slots.size(0) >= p.size.depth,
        "candidate_states: {} slots and {} positions, expected a slot for each position",
        p.slots.size(0), p.size.depth);
}

inline void check_bias_silu(const BiasSiluParams& p) {
  check_matrix("bias_silu", "y", p.y, p.y.size(0), p.y.size(1), p.y);
  check_elements("bias_silu", "bias", p.bias, p.y.size(1), p.y);
}

inline void check_lattice_attention(const LatticeAttentionParams& p) {
  const char* op = "lattice_attention";
  check_lattice_size(op, p.size);
  const int64_t width = p.out.size(1);
  CHECK(p.num_heads >= 1 && width % (8 * p.num_heads) == 0 &&
            width / p.num_heads <= kMaxLatticeHeadDim,
        "lattice_attention: {} heads in {} columns, expected heads of a multiple of 8 values, at "
        "most {}",
        p.num_heads, width, kMaxLatticeHeadDim);
  check_matrix(op, "out", p.out, p.size.rows(), width, p.out);
  check_matrix(op, "qkv", p.qkv, p.size.rows(), 3 * width, p.out);
  check_matrix(op, "slot_bias", p.slot_bias, p.num_heads, p.slot_bias.size(1), p.out);
  check_elements(op, "same_bias", p.same_bias, p.num_heads, p.out);
  CHECK(p.slot_bias.size(1) % 2 == 1 && p.slot_bias.size(1) / 2 >= p.size.depth,
        "lattice_attention: {} distances and {} positions, expected 2 S + 1 of S positions or more",
        p.slot_bias.size(1), p.size.depth);
}

inline void check_factor_inputs(const FactorInputsParams& p) {
  const char* op = "factor_inputs";
  check_lattice_size(op, p.size);
  const int64_t width = p.x.size(1);
  check_matrix(op, "x", p.x, p.size.rows(), width, p.x);
  check_matrix(op, "anchors", p.anchors, p.size.num_seqs, width, p.x);
  check_matrix(op, "out", p.out, p.size.rows(), 3 * width, p.x);
}

inline void check_factor_pairs(const FactorPairsParams& p) {
  const char* op = "factor_pairs";
  check_lattice_size(op, p.size);
  check_matrix(op, "anchors", p.anchors, p.size.num_seqs, p.anchors.size(1), p.factors);
  check_matrix(op, "factors", p.factors, p.size.rows(), 2 * p.anchors.size(1), p.factors);
  CHECK(p.factors.dtype() == DType::kF32, "factor_pairs: the factors are {}, expected float32",
        name_of(p.factors.dtype()));
  CHECK(p.eps > 0, "factor_pairs: eps is {}, expected a positive number", p.eps);
}

}  // namespace cpmcu
