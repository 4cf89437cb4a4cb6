// C.ops of block drafters, and of a draft that keeps no keys.
#include "kernels/bind_fields.h"
#include "kernels/layer/block_conv.h"
#include "kernels/tree/gru_chain.h"
#include "kernels/tree/gru_tree.h"
#include "kernels/tree/keyless_rows.h"
#include "kernels/tree/lattice.h"
#include "kernels/tree/lilicorr.h"
#include "kernels/tree/rnn_tree.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

template <typename P>
Fields<P> lattice_size() {
  return within(&P::size, field("num_seqs", &LatticeSize::num_seqs),
                field("depth", &LatticeSize::depth), field("topk", &LatticeSize::topk));
}

void bind_lilicorr_ops(py::module_& m) {
  const char* lilicorr_h = "csrc/kernels/tree/lilicorr.h";
  using Features = CandidateFeaturesParams;
  bind_op(m, "candidate_features", candidate_features, lilicorr_h, py::kw_only(),
          lattice_size<Features>(), field("logprobs", &Features::logprobs),
          field("norm_weight", &Features::norm_weight), field("norm_bias", &Features::norm_bias),
          field("weight", &Features::weight), field("bias", &Features::bias),
          field("out", &Features::out));
  using States = CandidateStatesParams;
  bind_op(m, "candidate_states", candidate_states, lilicorr_h, py::kw_only(),
          lattice_size<States>(), field("x", &States::x), field("hidden", &States::hidden),
          field("slots", &States::slots), field("ranks", &States::ranks),
          field("biases", &States::biases));
  bind_op(m, "bias_silu", bias_silu, lilicorr_h, field("y", &BiasSiluParams::y),
          field("bias", &BiasSiluParams::bias));
  using Attention = LatticeAttentionParams;
  bind_op(m, "lattice_attention", lattice_attention, lilicorr_h, py::kw_only(),
          lattice_size<Attention>(), field("num_heads", &Attention::num_heads),
          field("qkv", &Attention::qkv), field("slot_bias", &Attention::slot_bias),
          field("same_bias", &Attention::same_bias), field("out", &Attention::out));
  using Inputs = FactorInputsParams;
  bind_op(m, "factor_inputs", factor_inputs, lilicorr_h, py::kw_only(), lattice_size<Inputs>(),
          field("x", &Inputs::x), field("anchors", &Inputs::anchors), field("out", &Inputs::out));
  using Pairs = FactorPairsParams;
  bind_op(m, "factor_pairs", factor_pairs, lilicorr_h, py::kw_only(), lattice_size<Pairs>(),
          field("candidates", &Pairs::candidates), field("factors", &Pairs::factors),
          field("anchors", &Pairs::anchors), field("eps", &Pairs::eps),
          field("scale", &Pairs::scale), field("pairs", &Pairs::pairs));
}

template <typename P>
Fields<P> node_rows_fields() {
  return within(&P::rows,
                shaped("tokens", &NodeRows::tokens, 1, &NodeRows::num_seqs, &NodeRows::num_rows),
                field("parents", &NodeRows::parents), field("row_scores", &NodeRows::scores));
}

void bind_gru_ops(py::module_& m) {
  const char* gru_chain_h = "csrc/kernels/tree/gru_chain.h";
  using Gru = GruCellParams;
  bind_op(m, "gru_cell", gru_cell, gru_chain_h, py::kw_only(),
          field("from_input", &Gru::from_input), option("from_state", &Gru::from_state),
          field("state", &Gru::state), field("copy", &Gru::copy),
          field("copy_stride", &Gru::copy_stride));
  using Chain = ChainStepParams;
  bind_op(
      m, "chain_step", chain_step, gru_chain_h, py::kw_only(),
      shaped("candidates", &Chain::candidates, 0, &Chain::num_seqs, &Chain::depth, &Chain::topk),
      field("level", &Chain::level), field("logprobs", &Chain::logprobs),
      field("seq_slots", &Chain::seq_slots), field("next_tokens", &Chain::next_tokens),
      option("fixed", &Chain::fixed), option("moving", &Chain::moving),
      field("successors", &Chain::successors), field("roots", &Chain::roots),
      field("tokens", &Chain::tokens), field("draft", &Chain::draft));
  const char* gru_tree_h = "csrc/kernels/tree/gru_tree.h";
  using Scores = NodeScoresParams;
  bind_op(m, "node_scores", node_scores, gru_tree_h, py::kw_only(), node_rows_fields<Scores>(),
          shaped("candidates", &Scores::candidates, 1, &Scores::depth, &Scores::topk),
          field("level", &Scores::level), field("logprobs", &Scores::logprobs),
          option("fixed", &Scores::fixed), option("moving", &Scores::moving),
          field("successors", &Scores::successors), field("scores", &Scores::scores),
          field("seq_slots", &Scores::seq_slots), field("next_tokens", &Scores::next_tokens),
          field("roots", &Scores::roots));
  using Rows = NodeRowsParams;
  bind_op(m, "node_rows", node_rows, gru_tree_h, py::kw_only(), node_rows_fields<Rows>(),
          shaped("candidates", &Rows::candidates, 1, &Rows::depth, &Rows::topk),
          field("level", &Rows::level), field("scores", &Rows::scores),
          field("state_rows", &Rows::state_rows));
  using Draft = NodeDraftParams;
  bind_op(m, "node_draft", node_draft, gru_tree_h, py::kw_only(), node_rows_fields<Draft>(),
          field("depth", &Draft::depth), field("draft", &Draft::draft));
}

}  // namespace

void bind_block_ops(py::module_& m) {
  const char* lattice_h = "csrc/kernels/tree/lattice.h";
  bind_op(m, "block_conv", block_conv, "csrc/kernels/layer/block_conv.h", py::kw_only(),
          field("out", &BlockConvParams::out), field("x", &BlockConvParams::x),
          field("base", &BlockConvParams::base), field("delta", &BlockConvParams::delta),
          option("first", &BlockConvParams::first), field("group", &BlockConvParams::group),
          field("num_rows", &BlockConvParams::num_rows), option("adds", &BlockConvParams::adds));
  using Rows = BlockRowsParams;
  bind_op(m, "block_rows", block_rows, lattice_h, py::kw_only(), field("mask_id", &Rows::mask_id),
          field("seq_slots", &Rows::seq_slots), field("lengths", &Rows::lengths),
          field("next_tokens", &Rows::next_tokens),
          shaped("ids", &Rows::ids, 0, &Rows::num_seqs, &Rows::num_rows),
          field("positions", &Rows::positions), field("token_seqs", &Rows::token_seqs),
          field("seq_token_begin", &Rows::seq_token_begin), field("all_masks", &Rows::all_masks),
          field("mask_rows", &Rows::mask_rows));
  using Keyless = KeylessRowsParams;
  bind_op(m, "keyless_rows", keyless_rows, "csrc/kernels/tree/keyless_rows.h", py::kw_only(),
          field("num_rows", &Keyless::num_rows),
          shaped("seq_slots", &Keyless::seq_slots, 0, &Keyless::num_seqs),
          field("lengths", &Keyless::lengths), field("next_tokens", &Keyless::next_tokens),
          field("accepted", &Keyless::accepted), field("row_slots", &Keyless::row_slots),
          field("positions", &Keyless::positions), field("token_seqs", &Keyless::token_seqs),
          field("seq_token_begin", &Keyless::seq_token_begin), field("masks", &Keyless::masks),
          field("root_ids", &Keyless::root_ids), field("hidden_rows", &Keyless::hidden_rows),
          field("draft_lengths", &Keyless::draft_lengths));
  using Block = BlockCandidates;
  const Fields<Block> block = fields_of<Block>(
      shaped("candidates", &Block::ids, 0, &Block::num_seqs, &Block::depth, &Block::topk),
      field("logprobs", &Block::logprobs), option("id_map", &Block::id_map),
      field("seq_slots", &Block::seq_slots), field("next_tokens", &Block::next_tokens));
  using Pairs = PairScoresParams;
  bind_op(m, "pair_scores", pair_scores, lattice_h, py::kw_only(), within(&Pairs::block, block),
          field("predecessors", &Pairs::predecessors), field("successors", &Pairs::successors),
          option("gates", &Pairs::gates), option("predecessor_gates", &Pairs::predecessor_gates),
          option("keeps_rest", &Pairs::keeps_rest), field("tokens", &Pairs::tokens),
          field("pairs", &Pairs::pairs));
  using Tree = LatticeTreeParams;
  bind_op(m, "lattice_tree", lattice_tree, lattice_h, py::kw_only(),
          within(&Tree::lattice,
                 shaped("candidates", &Lattice::tokens, 0, &Lattice::num_seqs, &Lattice::depth,
                        &Lattice::topk),
                 option("scores", &Lattice::scores), option("pairs", &Lattice::pairs)),
          field("depth", &Tree::depth), option("chain", &Tree::chain),
          option("off_path", &Tree::off_path), field("draft", &Tree::draft));
  using Rnn = RnnTreeParams;
  bind_op(m, "rnn_tree", rnn_tree, "csrc/kernels/tree/rnn_tree.h", py::kw_only(),
          within(&Rnn::block, block), field("inputs", &Rnn::inputs), field("weight", &Rnn::weight),
          field("predecessors", &Rnn::predecessors), field("successors", &Rnn::successors),
          field("states", &Rnn::states), field("longest", &Rnn::longest),
          option("chain", &Rnn::chain), field("draft", &Rnn::draft));
  bind_gru_ops(m);
  bind_lilicorr_ops(m);
}

}  // namespace cpmcu
