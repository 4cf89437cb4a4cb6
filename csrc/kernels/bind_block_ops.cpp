// C.ops of block drafters (kernels/tree/lattice.h, kernels/layer/block_conv.h).
#include "kernels/bind_fields.h"
#include "kernels/layer/block_conv.h"
#include "kernels/tree/lattice.h"

namespace py = pybind11;

namespace cpmcu {

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
  using Pairs = PairScoresParams;
  bind_op(
      m, "pair_scores", pair_scores, lattice_h, py::kw_only(),
      shaped("candidates", &Pairs::candidates, 0, &Pairs::num_seqs, &Pairs::depth, &Pairs::topk),
      field("logprobs", &Pairs::logprobs), option("id_map", &Pairs::id_map),
      field("seq_slots", &Pairs::seq_slots), field("next_tokens", &Pairs::next_tokens),
      field("predecessors", &Pairs::predecessors), field("successors", &Pairs::successors),
      option("gates", &Pairs::gates), option("keeps_rest", &Pairs::keeps_rest),
      field("tokens", &Pairs::tokens), field("pairs", &Pairs::pairs));
  using Tree = LatticeTreeParams;
  bind_op(m, "lattice_tree", lattice_tree, lattice_h, py::kw_only(),
          within(&Tree::lattice,
                 shaped("candidates", &Lattice::tokens, 0, &Lattice::num_seqs, &Lattice::depth,
                        &Lattice::topk),
                 option("scores", &Lattice::scores), option("pairs", &Lattice::pairs)),
          field("depth", &Tree::depth), option("chain", &Tree::chain),
          option("off_path", &Tree::off_path), field("draft", &Tree::draft));
}

}  // namespace cpmcu
