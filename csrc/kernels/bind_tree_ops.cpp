// C.ops of token trees (kernels/tree/tree.h). One function for each op, with the names of the
// fields.
#include <pybind11/stl.h>

#include "kernels/bind_ops.h"
#include "kernels/tree/draft_fill.h"
#include "kernels/tree/inner_step.h"
#include "kernels/tree/mtp_rows.h"
#include "kernels/tree/tree.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

struct OpsTrees {
  TokenTrees trees;
  std::vector<SharedArray> arrays;
};

using OpsDraft = OpsParams<Draft>;

struct OpsBeam {
  DraftBeam beam;
  std::vector<SharedArray> arrays;
};

int size_of_dim(const SharedArray& array, int dim) {
  return static_cast<int>(array->tensor().size(dim));
}

void bind_tree_params(py::module_& m) {
  py::class_<OpsTrees>(m, "TokenTrees", "One tree for each sequence; see csrc/kernels/tree/tree.h.")
      .def(py::init([](SharedArray tokens, SharedArray parents, SharedArray depths,
                       SharedArray masks, SharedArray token_ids, SharedArray token_positions,
                       SharedArray token_slots, SharedArray token_seqs,
                       SharedArray seq_token_begin) {
             return OpsTrees{{.num_seqs = size_of_dim(tokens, 0),
                              .num_nodes = size_of_dim(tokens, 1),
                              .tokens = ints(tokens),
                              .parents = ints(parents),
                              .depths = ints(depths),
                              .masks = words(masks),
                              .token_ids = ints(token_ids),
                              .token_positions = ints(token_positions),
                              .token_slots = ints(token_slots),
                              .token_seqs = ints(token_seqs),
                              .seq_token_begin = ints(seq_token_begin)},
                             {tokens, parents, depths, masks, token_ids, token_positions,
                              token_slots, token_seqs, seq_token_begin}};
           }),
           py::kw_only(), "tokens"_a, "parents"_a, "depths"_a, "masks"_a, "token_ids"_a,
           "token_positions"_a, "token_slots"_a, "token_seqs"_a, "seq_token_begin"_a);

  py::class_<OpsBeam>(m, "DraftBeam", "State of the growth of trees; see csrc/kernels/tree/tree.h.")
      .def(py::init([](int num_seqs, int topk, int depth, SharedArray scores, SharedArray tokens,
                       SharedArray level_candidates, SharedArray token_scores,
                       SharedArray ancestor_masks, SharedArray token_ids, SharedArray token_parents,
                       SharedArray token_positions, SharedArray token_seqs,
                       SharedArray seq_token_begin) {
             return OpsBeam{
                 {.num_seqs = num_seqs,
                  .topk = topk,
                  .depth = depth,
                  .scores = floats(scores),
                  .tokens = ints(tokens),
                  .level_candidates = ints(level_candidates),
                  .token_scores = floats(token_scores),
                  .ancestor_masks = words(ancestor_masks),
                  .token_ids = ints(token_ids),
                  .token_parents = ints(token_parents),
                  .token_positions = ints(token_positions),
                  .token_seqs = ints(token_seqs),
                  .seq_token_begin = ints(seq_token_begin)},
                 {scores, tokens, level_candidates, token_scores, ancestor_masks, token_ids,
                  token_parents, token_positions, token_seqs, seq_token_begin}};
           }),
           py::kw_only(), "num_seqs"_a, "topk"_a, "depth"_a, "scores"_a, "tokens"_a,
           "level_candidates"_a, "token_scores"_a, "ancestor_masks"_a, "token_ids"_a,
           "token_parents"_a, "token_positions"_a, "token_seqs"_a, "seq_token_begin"_a);

  py::class_<OpsDraft>(m, "Draft", "Drafted tokens of each sequence; see csrc/kernels/tree/tree.h.")
      .def(py::init([](SharedArray tokens, SharedArray parents, SharedArray scores) {
             return OpsDraft{{.num_tokens = size_of_dim(tokens, 1),
                              .tokens = ints(tokens),
                              .parents = ints(parents),
                              .scores = floats(scores)},
                             {tokens, parents, scores}};
           }),
           py::kw_only(), "tokens"_a, "parents"_a = SharedArray(), "scores"_a = SharedArray());

  PYBIND11_NUMPY_DTYPE(SlotStop, stop_ids, num_stop_ids, max_tokens, finished);
  m.attr("slot_stop_dtype") = py::dtype::of<SlotStop>();
  PYBIND11_NUMPY_DTYPE(FillPath, length, first, match, num_tokens, tokens);
  m.attr("fill_path_dtype") = py::dtype::of<FillPath>();
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
      "logprobs"_a, "csrc/kernels/tree/tree.h");
  m.def(
      "tree_expand",
      [](const OpsContext& c, const OpsBeam& beam, int level, SharedArray topk_tokens,
         SharedArray topk_logprobs, SharedArray seq_slots, SharedArray accepted_counts,
         SharedArray draft_lengths) {
        tree_expand(c.ctx, {.beam = beam.beam,
                            .level = level,
                            .topk_tokens = ints(topk_tokens),
                            .topk_logprobs = floats(topk_logprobs),
                            .seq_slots = ints(seq_slots),
                            .accepted_counts = ints(accepted_counts),
                            .draft_lengths = ints(draft_lengths)});
      },
      "ctx"_a, py::kw_only(), "beam"_a, "level"_a, "topk_tokens"_a, "topk_logprobs"_a,
      "seq_slots"_a, "accepted_counts"_a, "draft_lengths"_a, "csrc/kernels/tree/tree.h");
  m.def(
      "draft_select",
      [](const OpsContext& c, const OpsBeam& beam, const OpsDraft& draft) {
        draft_select(c.ctx, {beam.beam, draft.params});
      },
      "ctx"_a, py::kw_only(), "beam"_a, "draft"_a, "csrc/kernels/tree/tree.h");
  m.def(
      "tree_build",
      [](const OpsContext& c, const OpsDraft& draft, const OpsTrees& trees, SharedArray seq_slots,
         const OpsState& slots) {
        tree_build(c.ctx, {draft.params, trees.trees, ints(seq_slots), slots.state});
      },
      "ctx"_a, py::kw_only(), "draft"_a = OpsDraft(), "trees"_a, "seq_slots"_a, "slots"_a,
      "csrc/kernels/tree/tree.h");
  m.def(
      "begin_draft",
      [](const OpsContext& c, SharedArray seq_slots, int num_seqs, SharedArray lengths,
         const OpsAccepted& accepted, bool shifted, SharedArray draft_lengths, SharedArray ids,
         SharedArray positions, SharedArray token_seqs, SharedArray hidden_rows,
         SharedArray seq_token_begin, SharedArray last_rows) {
        begin_draft(c.ctx, {.seq_slots = ints(seq_slots),
                            .num_seqs = num_seqs,
                            .lengths = ints(lengths),
                            .accepted = accepted.params,
                            .shifted = shifted,
                            .draft_lengths = ints(draft_lengths),
                            .ids = ints(ids),
                            .positions = ints(positions),
                            .token_seqs = ints(token_seqs),
                            .hidden_rows = ints(hidden_rows),
                            .seq_token_begin = ints(seq_token_begin),
                            .last_rows = ints(last_rows)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "num_seqs"_a, "lengths"_a, "accepted"_a, "shifted"_a,
      "draft_lengths"_a, "ids"_a, "positions"_a, "token_seqs"_a, "hidden_rows"_a,
      "seq_token_begin"_a, "last_rows"_a, "csrc/kernels/tree/tree.h");
  m.def(
      "shift_prompt",
      [](const OpsContext& c, int max_path, SharedArray ids, SharedArray token_seqs,
         SharedArray seq_slots, SharedArray seq_token_begin, SharedArray lengths,
         const std::vector<SharedArray>& first, SharedArray first_lengths,
         const std::vector<SharedArray>& rest, SharedArray num_shared) {
        const auto launch_of =
            [](const std::vector<SharedArray>& arrays) -> ShiftPromptParams::Launch {
          CHECK(arrays.size() == 5, "shift_prompt: {} arrays for a launch, expected 5",
                arrays.size());
          return {ints(arrays[0]), ints(arrays[1]), ints(arrays[2]), ints(arrays[3]),
                  ints(arrays[4])};
        };
        shift_prompt(c.ctx, {.num_seqs = size_of_dim(seq_slots, 0),
                             .num_tokens = size_of_dim(ids, 0),
                             .max_path = max_path,
                             .ids = ints(ids),
                             .token_seqs = ints(token_seqs),
                             .seq_slots = ints(seq_slots),
                             .seq_token_begin = ints(seq_token_begin),
                             .lengths = ints(lengths),
                             .num_shared = ints(num_shared),
                             .first = launch_of(first),
                             .first_lengths = ints(first_lengths),
                             .rest = launch_of(rest)});
      },
      "ctx"_a, py::kw_only(), "max_path"_a, "ids"_a, "token_seqs"_a, "seq_slots"_a,
      "seq_token_begin"_a, "lengths"_a, "first"_a, "first_lengths"_a, "rest"_a,
      "num_shared"_a = SharedArray(), "csrc/kernels/tree/tree.h");
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
      "min_ngram"_a = 1, "max_ngram"_a = 4, "chain"_a, "first"_a = 0, "csrc/kernels/tree/tree.h");
}

void bind_mtp(py::module_& m) {
  m.def(
      "mtp_rows",
      [](const OpsContext& c, int module, int window, bool chain_hidden, SharedArray seq_slots,
         const OpsState& state, const OpsBeam* beam, SharedArray prompt_ids,
         SharedArray prompt_begin, SharedArray draft_lengths, SharedArray ids,
         SharedArray positions, SharedArray token_seqs, SharedArray hidden_rows,
         SharedArray ancestor_masks, SharedArray seq_token_begin, SharedArray last_rows,
         SharedArray lengths) {
        mtp_rows(c.ctx, {.module = module,
                         .window = window,
                         .chain_hidden = chain_hidden,
                         .num_seqs = size_of_dim(seq_slots, 0),
                         .seq_slots = ints(seq_slots),
                         .slots = state.state,
                         .beam = beam ? beam->beam : DraftBeam{},
                         .prompt_ids = ints(prompt_ids),
                         .prompt_begin = ints(prompt_begin),
                         .draft_lengths = ints(draft_lengths),
                         .rows = {.ids = ints(ids),
                                  .positions = ints(positions),
                                  .token_seqs = ints(token_seqs),
                                  .hidden_rows = ints(hidden_rows),
                                  .ancestor_masks = words(ancestor_masks),
                                  .seq_token_begin = ints(seq_token_begin),
                                  .last_rows = ints(last_rows),
                                  .lengths = ints(lengths)}});
      },
      "ctx"_a, py::kw_only(), "module"_a, "window"_a, "chain_hidden"_a, "seq_slots"_a, "state"_a,
      "beam"_a = nullptr, "prompt_ids"_a = SharedArray(), "prompt_begin"_a = SharedArray(),
      "draft_lengths"_a = SharedArray(), "ids"_a, "positions"_a, "token_seqs"_a, "hidden_rows"_a,
      "ancestor_masks"_a, "seq_token_begin"_a, "last_rows"_a, "lengths"_a,
      "csrc/kernels/tree/mtp_rows.h");
  m.def(
      "shift_ids",
      [](const OpsContext& c, int shift, SharedArray ids, SharedArray token_seqs,
         SharedArray seq_token_begin, SharedArray shifted) {
        shift_ids(c.ctx, {.shift = shift,
                          .num_tokens = size_of_dim(ids, 0),
                          .ids = ints(ids),
                          .token_seqs = ints(token_seqs),
                          .seq_token_begin = ints(seq_token_begin),
                          .shifted = ints(shifted)});
      },
      "ctx"_a, py::kw_only(), "shift"_a, "ids"_a, "token_seqs"_a, "seq_token_begin"_a, "shifted"_a,
      "csrc/kernels/tree/mtp_rows.h");
}

void bind_inner_step(py::module_& m) {
  m.def(
      "begin_inner",
      [](const OpsContext& c, SharedArray seq_slots, SharedArray lengths,
         const OpsAccepted& accepted, SharedArray first_tokens, const OpsState& inner,
         SharedArray stops, SharedArray rows, SharedArray slot_rows, SharedArray chain,
         SharedArray counts) {
        begin_inner(c.ctx, {.num_seqs = size_of_dim(chain, 0),
                            .seq_slots = ints(seq_slots),
                            .lengths = ints(lengths),
                            .accepted = accepted.params,
                            .first_tokens = ints(first_tokens),
                            .inner = inner.state,
                            .stops = structs<SlotStop>(stops),
                            .rows = ints(rows),
                            .slot_rows = ints(slot_rows),
                            .num_tokens = size_of_dim(chain, 1),
                            .chain = ints(chain),
                            .counts = structs<InnerCounts>(counts)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "lengths"_a, "accepted"_a, "first_tokens"_a, "inner"_a,
      "stops"_a, "rows"_a, "slot_rows"_a, "chain"_a, "counts"_a, "csrc/kernels/tree/inner_step.h");
  m.def(
      "extend_chain",
      [](const OpsContext& c, SharedArray seq_slots, const OpsAccepted& accepted, SharedArray stops,
         SharedArray chain, SharedArray counts) {
        extend_chain(c.ctx, {.num_seqs = size_of_dim(chain, 0),
                             .seq_slots = ints(seq_slots),
                             .accepted = accepted.params,
                             .stops = structs<SlotStop>(stops),
                             .num_tokens = size_of_dim(chain, 1),
                             .chain = ints(chain),
                             .counts = structs<InnerCounts>(counts)});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "accepted"_a, "stops"_a, "chain"_a, "counts"_a,
      "csrc/kernels/tree/inner_step.h");
}

void bind_fill(py::module_& m) {
  m.def(
      "draft_fill",
      [](const OpsContext& c, SharedArray seq_slots, const OpsState& state, const OpsDraft& draft,
         int max_depth, int min_ngram, int max_ngram, SharedArray hits, SharedArray trials,
         SharedArray paths, const OpsDraft& filled) {
        draft_fill(c.ctx, {.num_seqs = size_of_dim(seq_slots, 0),
                           .seq_slots = ints(seq_slots),
                           .slots = state.state,
                           .draft = draft.params,
                           .max_depth = max_depth,
                           .min_ngram = min_ngram,
                           .max_ngram = max_ngram,
                           .rates = {.hits = floats(hits), .trials = floats(trials)},
                           .paths = structs<FillPath>(paths),
                           .filled = filled.params});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "state"_a, "draft"_a, "max_depth"_a, "min_ngram"_a = 1,
      "max_ngram"_a = 4, "hits"_a, "trials"_a, "paths"_a, "filled"_a,
      "csrc/kernels/tree/draft_fill.h");
  m.def(
      "fill_observe",
      [](const OpsContext& c, SharedArray seq_slots, const OpsState& state, SharedArray paths,
         SharedArray hits, SharedArray trials) {
        fill_observe(c.ctx, {.num_seqs = size_of_dim(seq_slots, 0),
                             .seq_slots = ints(seq_slots),
                             .slots = state.state,
                             .paths = structs<FillPath>(paths),
                             .rates = {.hits = floats(hits), .trials = floats(trials)}});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "state"_a, "paths"_a, "hits"_a, "trials"_a,
      "csrc/kernels/tree/draft_fill.h");
}

void bind_verification(py::module_& m) {
  m.def(
      "accept_tree",
      [](const OpsContext& c, const OpsTrees& trees, SharedArray drawn, SharedArray logprobs,
         SharedArray seq_slots, SharedArray sampling, const OpsState& state, SharedArray stops,
         const OpsSink& sink, SharedArray candidates, int verify_window, SharedArray inner) {
        accept_tree(c.ctx, {.trees = trees.trees,
                            .drawn = ints(drawn),
                            .logprobs = structs<TokenLogprobs>(logprobs),
                            .seq_slots = ints(seq_slots),
                            .sampling = structs<SlotSampling>(sampling),
                            .candidates = structs<TokenCandidates>(candidates),
                            .verify_window = verify_window,
                            .state = state.state,
                            .stops = structs<SlotStop>(stops),
                            .inner = structs<InnerCounts>(inner),
                            .sink = sink.params});
      },
      "ctx"_a, py::kw_only(), "trees"_a, "drawn"_a, "logprobs"_a, "seq_slots"_a, "sampling"_a,
      "state"_a, "stops"_a, "sink"_a = OpsSink(), "candidates"_a = SharedArray(),
      "verify_window"_a = 0, "inner"_a = SharedArray(), "csrc/kernels/tree/tree.h");
  m.def(
      "keep_accepted",
      [](const OpsContext& c, SharedArray pool, int num_heads, int width, SharedArray page_table,
         int num_nodes, SharedArray seq_slots, SharedArray lengths, const OpsAccepted& accepted,
         SharedArray hidden, SharedArray accepted_hidden) {
        keep_accepted(c.ctx, {.pool = tensor_of(pool),
                              .num_heads = num_heads,
                              .width = width,
                              .page_table = ints(page_table),
                              .max_pages = size_of_dim(page_table, 1),
                              .num_seqs = size_of_dim(seq_slots, 0),
                              .num_nodes = num_nodes,
                              .seq_slots = ints(seq_slots),
                              .lengths = ints(lengths),
                              .accepted = accepted.params,
                              .hidden = tensor_of(hidden),
                              .accepted_hidden = tensor_of(accepted_hidden)});
      },
      "ctx"_a, py::kw_only(), "pool"_a, "num_heads"_a, "width"_a, "page_table"_a, "num_nodes"_a,
      "seq_slots"_a, "lengths"_a, "accepted"_a, "hidden"_a = SharedArray(),
      "accepted_hidden"_a = SharedArray(), "csrc/kernels/tree/tree.h");
}

}  // namespace

void bind_tree_ops(py::module_& ops) {
  bind_tree_params(ops);
  bind_growth(ops);
  bind_fill(ops);
  bind_mtp(ops);
  bind_inner_step(ops);
  bind_verification(ops);
}

}  // namespace cpmcu
