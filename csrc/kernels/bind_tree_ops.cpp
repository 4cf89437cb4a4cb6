// C.ops of speculation (kernels/tree.h): one call an op, fields by their names.
#include <pybind11/stl.h>

#include "kernels/bind_ops.h"
#include "kernels/tree.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

struct OpsTrees {
  TokenTrees trees;
  std::vector<SharedArray> arrays;
};

struct OpsBeam {
  DraftBeam beam;
  std::vector<SharedArray> arrays;
};

int size_of_dim(const SharedArray& array, int dim) {
  return static_cast<int>(array->tensor().size(dim));
}

void bind_tree_params(py::module_& m) {
  py::class_<OpsTrees>(m, "TokenTrees", "One tree a sequence; see csrc/kernels/tree.h.")
      .def(py::init([](SharedArray tokens, SharedArray parents, SharedArray depths,
                       SharedArray masks, SharedArray row_ids, SharedArray row_positions,
                       SharedArray row_slots, SharedArray row_seqs, SharedArray seq_row_begin) {
             return OpsTrees{{.num_seqs = size_of_dim(tokens, 0),
                              .num_nodes = size_of_dim(tokens, 1),
                              .tokens = ints(tokens),
                              .parents = ints(parents),
                              .depths = ints(depths),
                              .masks = words(masks),
                              .row_ids = ints(row_ids),
                              .row_positions = ints(row_positions),
                              .row_slots = ints(row_slots),
                              .row_seqs = ints(row_seqs),
                              .seq_row_begin = ints(seq_row_begin)},
                             {tokens, parents, depths, masks, row_ids, row_positions, row_slots,
                              row_seqs, seq_row_begin}};
           }),
           py::kw_only(), "tokens"_a, "parents"_a, "depths"_a, "masks"_a, "row_ids"_a,
           "row_positions"_a, "row_slots"_a, "row_seqs"_a, "seq_row_begin"_a);

  py::class_<OpsBeam>(m, "DraftBeam", "The growth of trees; see csrc/kernels/tree.h.")
      .def(py::init([](int num_seqs, int topk, int depth, SharedArray scores, SharedArray tokens,
                       SharedArray level_candidates, SharedArray row_scores, SharedArray row_masks,
                       SharedArray row_ids, SharedArray row_parents, SharedArray row_positions,
                       SharedArray row_seqs, SharedArray seq_row_begin) {
             return OpsBeam{{.num_seqs = num_seqs,
                             .topk = topk,
                             .depth = depth,
                             .scores = floats(scores),
                             .tokens = ints(tokens),
                             .level_candidates = ints(level_candidates),
                             .row_scores = floats(row_scores),
                             .row_masks = words(row_masks),
                             .row_ids = ints(row_ids),
                             .row_parents = ints(row_parents),
                             .row_positions = ints(row_positions),
                             .row_seqs = ints(row_seqs),
                             .seq_row_begin = ints(seq_row_begin)},
                            {scores, tokens, level_candidates, row_scores, row_masks, row_ids,
                             row_parents, row_positions, row_seqs, seq_row_begin}};
           }),
           py::kw_only(), "num_seqs"_a, "topk"_a, "depth"_a, "scores"_a, "tokens"_a,
           "level_candidates"_a, "row_scores"_a, "row_masks"_a, "row_ids"_a, "row_parents"_a,
           "row_positions"_a, "row_seqs"_a, "seq_row_begin"_a);

  PYBIND11_NUMPY_DTYPE(SlotStop, stop_ids, num_stop_ids, max_tokens, finished);
  m.attr("slot_stop_dtype") = py::dtype::of<SlotStop>();
}

void bind_growth(py::module_& m) {
  m.def(
      "topk_logprobs",
      [](const OpsContext& c, SharedArray logits, int topk, SharedArray id_map, SharedArray tokens,
         SharedArray logprobs) {
        topk_logprobs(c.ctx, {.logits = tensor_of(logits),
                              .topk = topk,
                              .id_map = ints(id_map),
                              .tokens = ints(tokens),
                              .logprobs = floats(logprobs)});
      },
      "ctx"_a, py::kw_only(), "logits"_a, "topk"_a, "id_map"_a = SharedArray(), "tokens"_a,
      "logprobs"_a, "csrc/kernels/tree.h");
  m.def(
      "tree_expand",
      [](const OpsContext& c, const OpsBeam& beam, int level, SharedArray topk_tokens,
         SharedArray topk_logprobs, SharedArray seq_slots, SharedArray pending_counts,
         SharedArray draft_lengths) {
        tree_expand(c.ctx, {.beam = beam.beam,
                            .level = level,
                            .topk_tokens = ints(topk_tokens),
                            .topk_logprobs = floats(topk_logprobs),
                            .seq_slots = ints(seq_slots),
                            .pending_counts = ints(pending_counts),
                            .draft_lengths = ints(draft_lengths)});
      },
      "ctx"_a, py::kw_only(), "beam"_a, "level"_a, "topk_tokens"_a, "topk_logprobs"_a,
      "seq_slots"_a, "pending_counts"_a, "draft_lengths"_a, "csrc/kernels/tree.h");
  m.def(
      "tree_build",
      [](const OpsContext& c, const OpsBeam& beam, const OpsTrees& trees, SharedArray seq_slots,
         const OpsState& slots) {
        tree_build(c.ctx, {beam.beam, trees.trees, ints(seq_slots), slots.state});
      },
      "ctx"_a, py::kw_only(), "beam"_a, "trees"_a, "seq_slots"_a, "slots"_a, "csrc/kernels/tree.h");
  m.def(
      "chain_build",
      [](const OpsContext& c, SharedArray chain, const OpsTrees& trees, SharedArray seq_slots,
         const OpsState& slots) {
        chain_build(c.ctx, {ints(chain), trees.trees, ints(seq_slots), slots.state});
      },
      "ctx"_a, py::kw_only(), "chain"_a, "trees"_a, "seq_slots"_a, "slots"_a,
      "csrc/kernels/tree.h");
  m.def(
      "begin_draft",
      [](const OpsContext& c, SharedArray seq_slots, int num_seqs, int max_pending,
         SharedArray pending_ids, SharedArray pending_counts, SharedArray draft_lengths,
         SharedArray ids, SharedArray positions, SharedArray row_seqs, SharedArray feature_rows,
         SharedArray seq_row_begin, SharedArray last_rows) {
        begin_draft(c.ctx, {.seq_slots = ints(seq_slots),
                            .num_seqs = num_seqs,
                            .max_pending = max_pending,
                            .pending_ids = ints(pending_ids),
                            .pending_counts = ints(pending_counts),
                            .draft_lengths = ints(draft_lengths),
                            .ids = ints(ids),
                            .positions = ints(positions),
                            .row_seqs = ints(row_seqs),
                            .feature_rows = ints(feature_rows),
                            .seq_row_begin = ints(seq_row_begin),
                            .last_rows = ints(last_rows)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "num_seqs"_a, "max_pending"_a, "pending_ids"_a,
      "pending_counts"_a, "draft_lengths"_a, "ids"_a, "positions"_a, "row_seqs"_a, "feature_rows"_a,
      "seq_row_begin"_a, "last_rows"_a, "csrc/kernels/tree.h");
  m.def(
      "skip_draft",
      [](const OpsContext& c, SharedArray seq_slots, int num_seqs, SharedArray pending_counts,
         SharedArray draft_lengths) {
        skip_draft(c.ctx, {ints(seq_slots), num_seqs, ints(pending_counts), ints(draft_lengths)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "num_seqs"_a, "pending_counts"_a, "draft_lengths"_a,
      "csrc/kernels/tree.h");
  m.def(
      "ngram_lookup",
      [](const OpsContext& c, SharedArray seq_slots, SharedArray history, SharedArray lengths,
         SharedArray next_tokens, int min_ngram, int max_ngram, SharedArray chain, int first) {
        ngram_lookup(c.ctx, {.seq_slots = ints(seq_slots),
                             .num_seqs = size_of_dim(chain, 0),
                             .history = ints(history),
                             .max_len = size_of_dim(history, 1),
                             .lengths = ints(lengths),
                             .next_tokens = ints(next_tokens),
                             .min_ngram = min_ngram,
                             .max_ngram = max_ngram,
                             .chain = ints(chain),
                             .first = first,
                             .num_tokens = size_of_dim(chain, 1)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "history"_a, "lengths"_a, "next_tokens"_a,
      "min_ngram"_a = 1, "max_ngram"_a = 4, "chain"_a, "first"_a = 0, "csrc/kernels/tree.h");
}

void bind_verification(py::module_& m) {
  m.def(
      "accept_tree",
      [](const OpsContext& c, const OpsTrees& trees, int max_emitted, SharedArray drawn,
         SharedArray logprobs, SharedArray seq_slots, SharedArray sampling, const OpsState& state,
         SharedArray stops, SharedArray paths, SharedArray num_emitted, SharedArray pending_ids,
         SharedArray pending_counts, SharedArray results, int ring_size, int max_seqs,
         SharedArray ticket, SharedArray done) {
        accept_tree(c.ctx, {.trees = trees.trees,
                            .max_emitted = max_emitted,
                            .drawn = ints(drawn),
                            .logprobs = structs<TokenLogprobs>(logprobs),
                            .seq_slots = ints(seq_slots),
                            .sampling = structs<SlotSampling>(sampling),
                            .state = state.state,
                            .stops = structs<SlotStop>(stops),
                            .paths = ints(paths),
                            .num_emitted = ints(num_emitted),
                            .pending_ids = ints(pending_ids),
                            .pending_counts = ints(pending_counts),
                            .results = structs<SlotResult>(results),
                            .ring_size = ring_size,
                            .max_seqs = max_seqs,
                            .ticket = words(ticket),
                            .done = words(done)});
      },
      "ctx"_a, py::kw_only(), "trees"_a, "max_emitted"_a, "drawn"_a, "logprobs"_a, "seq_slots"_a,
      "sampling"_a, "state"_a, "stops"_a, "paths"_a, "num_emitted"_a,
      "pending_ids"_a = SharedArray(), "pending_counts"_a = SharedArray(), "results"_a,
      "ring_size"_a, "max_seqs"_a, "ticket"_a, "done"_a, "csrc/kernels/tree.h");
  m.def(
      "keep_accepted",
      [](const OpsContext& c, SharedArray pool, int num_kv_heads, int head_dim,
         SharedArray page_table, int num_nodes, SharedArray seq_slots, SharedArray lengths,
         SharedArray paths, SharedArray num_emitted, SharedArray features,
         SharedArray pending_features) {
        keep_accepted(c.ctx, {.pool = tensor_of(pool),
                              .num_kv_heads = num_kv_heads,
                              .head_dim = head_dim,
                              .page_table = ints(page_table),
                              .max_pages = size_of_dim(page_table, 1),
                              .num_seqs = size_of_dim(paths, 0),
                              .num_nodes = num_nodes,
                              .max_emitted = size_of_dim(paths, 1),
                              .seq_slots = ints(seq_slots),
                              .lengths = ints(lengths),
                              .paths = ints(paths),
                              .num_emitted = ints(num_emitted),
                              .features = tensor_of(features),
                              .pending_features = tensor_of(pending_features)});
      },
      "ctx"_a, py::kw_only(), "pool"_a, "num_kv_heads"_a, "head_dim"_a, "page_table"_a,
      "num_nodes"_a, "seq_slots"_a, "lengths"_a, "paths"_a, "num_emitted"_a,
      "features"_a = SharedArray(), "pending_features"_a = SharedArray(), "csrc/kernels/tree.h");
}

}  // namespace

void bind_tree_ops(py::module_& ops) {
  bind_tree_params(ops);
  bind_growth(ops);
  bind_verification(ops);
}

}  // namespace cpmcu
