// Ops of a LiLiCorr head: a small transformer whose tokens are the candidates of a lattice
// (kernels/tree/lattice.h), and the pair scores of its results.
//
// A lattice of B sequences has R = B D K rows. Row (b D + d) K + i is candidate i of position d of
// sequence b; the candidates of a position are sorted, the likeliest first. All ops compute in
// float32 and round once.
#pragma once

#include "kernels/op.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

constexpr int kCandidateFeatures = 5;
constexpr int kMaxLatticeTopk = 16;       // maximum number of candidates of a position
constexpr int kMaxLatticeHeadDim = 256;   // maximum head size of lattice_attention
constexpr float kLeastLogprob = -10'000;  // lower log-probabilities, and NaN, count as this
constexpr float kFeatureNormEps = 1e-5f;

struct LatticeSize {
  int num_seqs = 0;  // B
  int depth = 0;     // D <= kMaxDraftDepth
  int topk = 0;      // K <= kMaxLatticeTopk
  int64_t positions() const { return int64_t{num_seqs} * depth; }
  int64_t rows() const { return positions() * topk; }
};

// out = silu(weight f' + bias), f' = LayerNorm(f). The features f of candidate i with the
// log-probability l are: l, exp(l), l - the position's largest l, i / (K - 1), and 1 if i = 0.
struct CandidateFeaturesParams {
  LatticeSize size;
  const float* logprobs = nullptr;  // [R]
  Tensor norm_weight{};             // [5]
  Tensor norm_bias{};               // [5]
  Tensor weight{};                  // [N, 5]
  Tensor bias{};                    // [N]
  Tensor out{};                     // [R, N]; all of one dtype
};
REGISTER_OP(candidate_features, CandidateFeaturesParams)

// x[row] += hidden[position] + slots[d] + ranks[i] + the sum of the biases, for candidate i of a
// position d of its sequence.
struct CandidateStatesParams {
  LatticeSize size;
  Tensor x{};       // [R, N], in place
  Tensor hidden{};  // [B D, N]
  Tensor slots{};   // [S, N], S >= D
  Tensor ranks{};   // [K, N]
  Tensor biases{};  // [M, N]; all of one dtype
};
REGISTER_OP(candidate_states, CandidateStatesParams)

// y[r] = silu(y[r] + bias).
struct BiasSiluParams {
  Tensor y{};     // [R, N], in place
  Tensor bias{};  // [N], same dtype
};
REGISTER_OP(bias_silu, BiasSiluParams)

// Attention among all candidates of a sequence. A query at position d and a key at position e have
//
//   logit = q k / sqrt(head size) + slot_bias[head, d - e + S] + (d = e ? same_bias[head] : 0)
struct LatticeAttentionParams {
  LatticeSize size;
  int num_heads = 0;   // each head has a multiple of 8 values, at most kMaxLatticeHeadDim
  Tensor qkv{};        // [R, 3 N]
  Tensor slot_bias{};  // [heads, 2 S + 1], S >= D
  Tensor same_bias{};  // [heads]
  Tensor out{};        // [R, N]; all of one dtype
};
REGISTER_OP(lattice_attention, LatticeAttentionParams)

// out[row] = [x, a, x a], a: the anchor of the row's sequence.
struct FactorInputsParams {
  LatticeSize size;
  Tensor x{};        // [R, N]
  Tensor anchors{};  // [B, N]
  Tensor out{};      // [R, 3 N]; all of one dtype
};
REGISTER_OP(factor_inputs, FactorInputsParams)

// The pairs of a lattice: log-softmax over the candidates b of
//
//   scale * unit(out of candidate a one position before) . unit(in of b), unit(v) = v / max(|v|,
//   eps)
//
// At depth 0 the sequence's anchor replaces the out-vector of a. A missing candidate (negative)
// has the score -inf, and so has NaN. Below a missing candidate all scores are -inf.
struct FactorPairsParams {
  LatticeSize size;
  const int* candidates = nullptr;  // [R]
  Tensor factors{};  // [R, 2 F] float32: the out-vector of a candidate, then its in-vector
  Tensor anchors{};  // [B, F] float32
  float eps = 0;
  float scale = 1;
  float* pairs = nullptr;  // [B, D, K, K] out; at depth 0 only row 0 (the root) is written
};
REGISTER_OP(factor_pairs, FactorPairsParams)

}  // namespace cpmcu
