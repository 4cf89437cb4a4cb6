// C.ops of token trees (kernels/tree/tree.h).
#include <pybind11/stl.h>

#include "kernels/bind_fields.h"
#include "kernels/tree/draft_fill.h"
#include "kernels/tree/inner_step.h"
#include "kernels/tree/mtp_rows.h"
#include "kernels/tree/tree.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

void bind_tree_params(py::module_& m) {
  using T = TokenTrees;
  bind_params<T>(
      m, "TokenTrees", "One tree for each sequence; see csrc/kernels/tree/tree.h.",
      shaped("tokens", &T::tokens, 0, &T::num_seqs, &T::num_nodes), field("parents", &T::parents),
      field("depths", &T::depths), field("masks", &T::masks), field("token_ids", &T::token_ids),
      field("token_positions", &T::token_positions), field("token_slots", &T::token_slots),
      field("token_seqs", &T::token_seqs), field("seq_token_begin", &T::seq_token_begin));
  using B = DraftBeam;
  bind_params<B>(
      m, "DraftBeam", "State of the growth of trees; see csrc/kernels/tree/tree.h.",
      field("num_seqs", &B::num_seqs), field("topk", &B::topk), field("depth", &B::depth),
      field("scores", &B::scores), field("tokens", &B::tokens),
      field("level_candidates", &B::level_candidates), field("token_scores", &B::token_scores),
      field("ancestor_masks", &B::ancestor_masks), field("token_ids", &B::token_ids),
      field("token_parents", &B::token_parents), field("token_positions", &B::token_positions),
      field("token_seqs", &B::token_seqs), field("seq_token_begin", &B::seq_token_begin));
  bind_params<Draft>(m, "Draft", "Drafted tokens of each sequence; see csrc/kernels/tree/tree.h.",
                     shaped("tokens", &Draft::tokens, 1, &Draft::num_tokens),
                     option("parents", &Draft::parents), option("scores", &Draft::scores));

  PYBIND11_NUMPY_DTYPE(SlotStop, stop_ids, num_stop_ids, max_tokens, finished);
  m.attr("slot_stop_dtype") = py::dtype::of<SlotStop>();
  PYBIND11_NUMPY_DTYPE(FillPath, length, first, match, num_tokens, tokens);
  m.attr("fill_path_dtype") = py::dtype::of<FillPath>();
}

// A launch of shift_prompt, passed as a list of its five arrays.
auto launch_of(const char* name, ShiftPromptParams::Launch ShiftPromptParams::* member) {
  return field_of<ShiftPromptParams, Arrays>(name, [member](ShiftPromptParams& p,
                                                            const Arrays& arrays) {
    CHECK(arrays.size() == 5, "shift_prompt: {} arrays for a launch, expected 5", arrays.size());
    const auto at = [&](int i) { return pointer_to<int>(arrays[i]); };
    p.*member = {at(0), at(1), at(2), at(3), at(4)};
  });
}

void bind_growth(py::module_& m) {
  const char* tree = "csrc/kernels/tree/tree.h";
  using TopK = TopkLogprobsParams;
  bind_op(m, "topk_logprobs", topk_logprobs, tree, py::kw_only(), field("logits", &TopK::logits),
          field("topk", &TopK::topk), option("id_map", &TopK::id_map),
          field("tokens", &TopK::tokens), field("logprobs", &TopK::logprobs));
  using Expand = TreeExpandParams;
  bind_op(m, "tree_expand", tree_expand, tree, py::kw_only(), field("beam", &Expand::beam),
          field("level", &Expand::level), field("topk_tokens", &Expand::topk_tokens),
          field("topk_logprobs", &Expand::topk_logprobs), field("seq_slots", &Expand::seq_slots),
          field("accepted_counts", &Expand::accepted_counts),
          field("draft_lengths", &Expand::draft_lengths));
  bind_op(m, "draft_select", draft_select, tree, py::kw_only(),
          field("beam", &DraftSelectParams::beam), field("draft", &DraftSelectParams::draft));
  using Build = TreeBuildParams;
  bind_op(m, "tree_build", tree_build, tree, py::kw_only(), option("draft", &Build::draft),
          field("trees", &Build::trees), field("seq_slots", &Build::seq_slots),
          field("slots", &Build::slots));
  using Begin = BeginDraftParams;
  bind_op(m, "begin_draft", begin_draft, tree, py::kw_only(), field("seq_slots", &Begin::seq_slots),
          field("num_seqs", &Begin::num_seqs), field("lengths", &Begin::lengths),
          field("accepted", &Begin::accepted), field("shifted", &Begin::shifted),
          field("draft_lengths", &Begin::draft_lengths), field("ids", &Begin::ids),
          field("positions", &Begin::positions), field("token_seqs", &Begin::token_seqs),
          field("hidden_rows", &Begin::hidden_rows),
          field("seq_token_begin", &Begin::seq_token_begin), field("last_rows", &Begin::last_rows));
  using Shift = ShiftPromptParams;
  bind_op(m, "shift_prompt", shift_prompt, tree, py::kw_only(), field("max_path", &Shift::max_path),
          shaped("ids", &Shift::ids, 0, &Shift::num_tokens),
          field("token_seqs", &Shift::token_seqs),
          shaped("seq_slots", &Shift::seq_slots, 0, &Shift::num_seqs),
          field("seq_token_begin", &Shift::seq_token_begin), field("lengths", &Shift::lengths),
          launch_of("first", &Shift::first), field("first_lengths", &Shift::first_lengths),
          launch_of("rest", &Shift::rest), option("num_shared", &Shift::num_shared));
  using Ngram = NgramLookupParams;
  bind_op(m, "ngram_lookup", ngram_lookup, tree, py::kw_only(),
          field("seq_slots", &Ngram::seq_slots),
          shaped("history", &Ngram::history, 1, &Ngram::max_len), field("lengths", &Ngram::lengths),
          field("next_tokens", &Ngram::next_tokens), option("min_ngram", &Ngram::min_ngram),
          option("max_ngram", &Ngram::max_ngram),
          shaped("chain", &Ngram::chain, 0, &Ngram::num_seqs, &Ngram::num_tokens),
          option("first", &Ngram::first));
}

void bind_mtp(py::module_& m) {
  const char* mtp = "csrc/kernels/tree/mtp_rows.h";
  using Mtp = MtpRowsParams;
  bind_op(
      m, "mtp_rows", mtp_rows, mtp, py::kw_only(), field("module", &Mtp::module),
      field("window", &Mtp::window), field("chain_hidden", &Mtp::chain_hidden),
      shaped("seq_slots", &Mtp::seq_slots, 0, &Mtp::num_seqs), field("state", &Mtp::slots),
      option("beam", &Mtp::beam), option("prompt_ids", &Mtp::prompt_ids),
      option("prompt_begin", &Mtp::prompt_begin), option("draft_lengths", &Mtp::draft_lengths),
      within(&Mtp::rows, field("ids", &MtpRows::ids), field("positions", &MtpRows::positions),
             field("token_seqs", &MtpRows::token_seqs), field("hidden_rows", &MtpRows::hidden_rows),
             field("ancestor_masks", &MtpRows::ancestor_masks),
             field("seq_token_begin", &MtpRows::seq_token_begin),
             field("last_rows", &MtpRows::last_rows), field("lengths", &MtpRows::lengths)));
  using Shift = ShiftIdsParams;
  bind_op(m, "shift_ids", shift_ids, mtp, py::kw_only(), field("shift", &Shift::shift),
          shaped("ids", &Shift::ids, 0, &Shift::num_tokens),
          field("token_seqs", &Shift::token_seqs),
          field("seq_token_begin", &Shift::seq_token_begin), field("shifted", &Shift::shifted));
}

void bind_inner_step(py::module_& m) {
  const char* inner = "csrc/kernels/tree/inner_step.h";
  using Begin = BeginInnerParams;
  bind_op(m, "begin_inner", begin_inner, inner, py::kw_only(),
          field("seq_slots", &Begin::seq_slots), field("lengths", &Begin::lengths),
          field("accepted", &Begin::accepted), field("first_tokens", &Begin::first_tokens),
          field("inner", &Begin::inner), field("stops", &Begin::stops), field("rows", &Begin::rows),
          field("slot_rows", &Begin::slot_rows),
          shaped("chain", &Begin::chain, 0, &Begin::num_seqs, &Begin::num_tokens),
          field("counts", &Begin::counts));
  using Extend = ExtendChainParams;
  bind_op(m, "extend_chain", extend_chain, inner, py::kw_only(),
          field("seq_slots", &Extend::seq_slots), field("accepted", &Extend::accepted),
          field("stops", &Extend::stops),
          shaped("chain", &Extend::chain, 0, &Extend::num_seqs, &Extend::num_tokens),
          field("counts", &Extend::counts));
}

void bind_fill(py::module_& m) {
  const char* draft_fill_h = "csrc/kernels/tree/draft_fill.h";
  const auto rates =
      fields_of<FillRates>(field("hits", &FillRates::hits), field("trials", &FillRates::trials));
  using Fill = DraftFillParams;
  bind_op(m, "draft_fill", draft_fill, draft_fill_h, py::kw_only(),
          shaped("seq_slots", &Fill::seq_slots, 0, &Fill::num_seqs), field("state", &Fill::slots),
          field("draft", &Fill::draft), field("max_depth", &Fill::max_depth),
          option("min_ngram", &Fill::min_ngram), option("max_ngram", &Fill::max_ngram),
          within(&Fill::rates, rates), field("paths", &Fill::paths),
          field("filled", &Fill::filled));
  using Observe = FillObserveParams;
  bind_op(m, "fill_observe", fill_observe, draft_fill_h, py::kw_only(),
          shaped("seq_slots", &Observe::seq_slots, 0, &Observe::num_seqs),
          field("state", &Observe::slots), field("paths", &Observe::paths),
          within(&Observe::rates, rates));
}

void bind_verification(py::module_& m) {
  const char* tree = "csrc/kernels/tree/tree.h";
  using Accept = AcceptTreeParams;
  bind_op(m, "accept_tree", accept_tree, tree, py::kw_only(), field("trees", &Accept::trees),
          field("drawn", &Accept::drawn), field("logprobs", &Accept::logprobs),
          field("seq_slots", &Accept::seq_slots), field("sampling", &Accept::sampling),
          field("state", &Accept::state), field("stops", &Accept::stops),
          option("sink", &Accept::sink), option("candidates", &Accept::candidates),
          option("verify_window", &Accept::verify_window), option("inner", &Accept::inner));
  using Keep = KeepAcceptedParams;
  bind_op(m, "keep_accepted", keep_accepted, tree, py::kw_only(), field("pool", &Keep::pool),
          field("num_heads", &Keep::num_heads), field("width", &Keep::width),
          shaped("page_table", &Keep::page_table, 1, &Keep::max_pages),
          field("num_nodes", &Keep::num_nodes),
          shaped("seq_slots", &Keep::seq_slots, 0, &Keep::num_seqs),
          field("lengths", &Keep::lengths), field("accepted", &Keep::accepted),
          option("hidden", &Keep::hidden), option("accepted_hidden", &Keep::accepted_hidden));
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
