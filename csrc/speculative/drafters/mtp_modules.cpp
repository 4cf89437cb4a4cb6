// Multi-token prediction with several modules: "mtp_modules". Module m drafts the token at depth
// m + 1. It computes what the single module of mtp.cpp does, with its own weights and KV cache.
//
// Row q of module m reads the id of token q + m + 1, and the hidden state of token q: the target's,
// or with `chain_hidden` that of module m - 1 in the same row.
//
// The ids of a module's last m rows are drafted tokens. So each step runs the last rows of every
// module again, with the tokens that were accepted. Rows that depend on no drafted token then have
// the values that a prompt would have written (kernels/tree/mtp_rows.h).
// Source: DeepSeek-AI, arXiv:2412.19437, 2.2.
#include <algorithm>

#include "kernels/layer/gather_rows.h"
#include "kernels/tree/mtp_rows.h"
#include "speculative/eagle_head.h"

namespace cpmcu {
namespace {

class MtpModules : public EagleHead {
 public:
  MtpModules(const DrafterSpec& spec, const ModelSpec& target)
      : EagleHead(spec, target, "MTP", mtp_form(spec), spec.options.integer("num_modules", 2)),
        chain_hidden_(spec_.options.flag("chain_hidden", false)) {
    spec_.options.check_known("MTP modules",
                              {"topk", "vocab_ids", "hidden_first", "num_modules", "chain_hidden"});
    CHECK(model().num_hidden_layers == 1, "an MTP module has {} layers, expected 1",
          model().num_hidden_layers);
    CHECK(num_modules() >= largest_.depth,
          "the draft depth is {}, expected at most the number of MTP modules, {}", largest_.depth,
          num_modules());
  }

  // Rows that read drafted tokens are run again. With branches, such rows reach further back than
  // the accepted tokens: they may have read a branch that was rejected.
  int num_recent(int depth) const override {
    const bool branches = topk_ > 1 || depth > largest_.depth;
    return depth + (branches ? largest_.depth : 1);
  }
  int num_rewritten() const override { return max_path(); }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    limits_ = limits;
    EagleHead::plan(plan, states, limits);
    CHECK(most_rows() <= kMaxTreeSize,
          "a draft of depth {} and top-k {} runs {} rows of an MTP module, expected at most {}",
          largest_.depth, topk_, most_rows(), kMaxTreeSize);
    rows_id_ =
        plan.add(spec_.scope + "module_rows", "state", carved_bytes([&](Carver& c) { layout(c); }));
    last_id_ = plan.add(spec_.scope + "module_last_hidden", "state",
                        max_branches() * width() * size_of(model().dtype));
  }

  void bind(const Arena& arena) override {
    EagleHead::bind(arena);
    Carver carver(arena.array<char>(rows_id_));
    layout(carver);
    last_hidden_ = arena.tensor(last_id_, model().dtype, {max_branches(), width()});
  }

  void prefill(const Context& ctx, const DraftPrompt& prompt) override {
    prefill_before(ctx, prompt);
    Tensor hidden = prompt.hidden.final;
    for (int module = 0; module < largest_.depth; ++module) {
      shift_ids(ctx, {.shift = module + 1,
                      .num_tokens = prompt.tokens.num_tokens,
                      .ids = prompt.ids,
                      .token_seqs = prompt.tokens.token_seqs,
                      .seq_token_begin = prompt.tokens.seq_token_begin,
                      .shifted = shifted_ids_});
      const Tensor own = run_module(
          ctx, module, {.phase = Phase::kPrefill, .ids = shifted_ids_, .tokens = prompt.tokens},
          {.x = hidden});
      if (chain_hidden_) hidden = own;
    }
  }

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    const int b = batch.num_seqs, k = width_of(batch.shape);
    const StepTokens tokens{.num_seqs = b,
                            .max_kv = batch.max_kv,
                            .seq_slots = batch.seq_slots,
                            .page_table = batch.page_table,
                            .max_pages = batch.max_pages};
    MtpRowsParams rows{.window = max_path(),
                       .chain_hidden = chain_hidden_,
                       .num_seqs = b,
                       .seq_slots = batch.seq_slots,
                       .slots = batch.slots,
                       .beam = beam_of(batch),
                       .draft_lengths = draft_lengths_,
                       .rows = rows_};
    Tensor before;
    for (int level = 0; level < batch.shape.depth; ++level) {
      rows.module = level;
      const Tensor hidden =
          run_rows(ctx, rows, Phase::kDecode, tokens, b * mtp_rows_of(max_path(), level, k),
                   mtp_rows_of(max_path(), level, k), batch.accepted.final, before);
      const Tensor last = last_hidden_.rows(0, level == 0 ? b : b * k);
      gather_rows(ctx, {.out = last, .x = hidden, .index = rows_.last_rows});
      expand(ctx, batch, level, last);
      before = hidden;
    }
    return select(ctx, batch);
  }

 protected:
  int most_rows() const override {
    return std::max(max_path(), mtp_rows_of(max_path(), largest_.depth - 1, topk_));
  }

 private:
  int64_t max_branches() const { return int64_t{limits_.max_seqs} * topk_; }

  void layout(Carver& carver) {
    const int64_t b = limits_.max_seqs, rows = b * most_rows();
    rows_ = {.ids = carver.take<int>(rows),
             .positions = carver.take<int>(rows),
             .token_seqs = carver.take<int>(rows),
             .hidden_rows = carver.take<int>(rows),
             .ancestor_masks = carver.take<uint64_t>(rows),
             .seq_token_begin = carver.take<int>(b + 1),
             .last_rows = carver.take<int>(max_branches()),
             .lengths = carver.take<int>(limits_.max_slots)};
    shifted_ids_ = carver.take<int>(limits_.max_prompt_tokens);
  }

  // Runs the last rows of the prompt before a chunk again: their ids were not all known.
  void prefill_before(const Context& ctx, const DraftPrompt& prompt) {
    int num_rows = 0;
    for (int before : prompt.num_before) num_rows += std::min(before, max_path());
    if (num_rows == 0) return;
    MtpRowsParams rows{.window = max_path(),
                       .chain_hidden = chain_hidden_,
                       .num_seqs = prompt.tokens.num_seqs,
                       .seq_slots = prompt.tokens.seq_slots,
                       .slots = prompt.slots,
                       .prompt_ids = prompt.ids,
                       .prompt_begin = prompt.tokens.seq_token_begin,
                       .rows = rows_};
    Tensor before;
    for (int module = 0; module < largest_.depth; ++module) {
      rows.module = module;
      before = run_rows(ctx, rows, Phase::kPrefill, prompt.tokens, num_rows, max_path(),
                        prompt.accepted.final, before);
    }
  }

  // Runs one module over the rows that `mtp_rows` makes. `before`: the result of the module before.
  Tensor run_rows(const Context& ctx, const MtpRowsParams& rows, Phase phase, StepTokens tokens,
                  int num_rows, int most, const Tensor& of_target, const Tensor& before) {
    mtp_rows(ctx, rows);
    tokens.num_tokens = num_rows;
    tokens.max_seq_tokens = most;
    tokens.positions = rows_.positions;
    tokens.token_seqs = rows_.token_seqs;
    tokens.seq_token_begin = rows_.seq_token_begin;
    tokens.slot_lengths = rows_.lengths;
    const bool branches = rows.module > 0 && rows.beam.topk > 1;
    if (branches) tokens.ancestor_masks = rows_.ancestor_masks;
    const bool chained = chain_hidden_ && rows.module > 0;
    return run_module(ctx, rows.module, {.phase = phase, .ids = rows_.ids, .tokens = tokens},
                      {.x = chained ? before : of_target, .index = rows_.hidden_rows});
  }

  const bool chain_hidden_;
  MemoryPlan::Id rows_id_ = 0, last_id_ = 0;
  MtpRows rows_;
  int* shifted_ids_ = nullptr;  // [T]: shifted ids of a prompt chunk
  Tensor last_hidden_;          // [max_seqs k, H]: hidden state of the last row of each branch
};

REGISTER_DRAFTER("mtp_modules", MtpModules);

}  // namespace
}  // namespace cpmcu
