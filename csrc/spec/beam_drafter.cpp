#include "spec/beam_drafter.h"

#include "kernels/gather_rows.h"

namespace cpmcu {

void BeamDrafter::plan(MemoryPlan& plan, const DraftLimits& limits) {
  limits_ = limits;
  const int64_t b = limits.max_seqs, k = spec_.topk, pending = max_pending();
  const int64_t candidates = num_candidates(spec_.topk, spec_.depth);
  num_ints_ = b * (candidates + spec_.depth * k + 4 * k + k * k + 4 * pending + 1) + 2 * (b + 1);
  num_floats_ = b * (candidates + k + k * k);
  ints_id_ = plan.add("draft.ints", "state", 4 * num_ints_);
  floats_id_ = plan.add("draft.floats", "state", 4 * num_floats_);
  masks_id_ = plan.add("draft.masks", "state", 8 * b * k);
  last_id_ = plan.add("draft.last_hidden", "state",
                      b * spec_.model.hidden_size * size_of(spec_.model.dtype));
  map_id_ = plan.add("draft.id_map", "state", static_cast<int64_t>(4 * spec_.vocab_ids.size()));
}

void BeamDrafter::bind(const Arena& arena) {
  const int b = limits_.max_seqs, k = spec_.topk, pending = max_pending();
  const int candidates = num_candidates(spec_.topk, spec_.depth);
  int* at = arena.array<int>(ints_id_);
  const auto take = [&](int count) {
    int* array = at;
    at += count;
    return array;
  };
  float* floats = arena.array<float>(floats_id_);
  beam_ = {.num_seqs = b,
           .topk = k,
           .depth = spec_.depth,
           .scores = floats,
           .tokens = take(b * candidates),
           .level_candidates = take(b * spec_.depth * k),
           .row_scores = floats + b * candidates,
           .row_masks = arena.array<uint64_t>(masks_id_),
           .row_ids = take(b * k),
           .row_parents = take(b * k),
           .row_positions = take(b * k),
           .row_seqs = take(b * k),
           .seq_row_begin = take(b + 1)};
  topk_logprobs_ = floats + b * (candidates + k);
  topk_tokens_ = take(b * k * k);
  sync_ids_ = take(b * pending);
  sync_positions_ = take(b * pending);
  sync_seqs_ = take(b * pending);
  sync_features_ = take(b * pending);
  sync_begin_ = take(b + 1);
  last_rows_ = take(b);
  last_hidden_ = arena.tensor(last_id_, spec_.model.dtype, {b, spec_.model.hidden_size});
  if (!spec_.vocab_ids.empty()) id_map_ = arena.array<int>(map_id_);
}

void BeamDrafter::finish_loading(const Context& ctx, const TargetParts&) {
  copy_to_device(ctx.device, id_map_, spec_.vocab_ids.data(),
                 static_cast<int64_t>(4 * spec_.vocab_ids.size()), ctx.stream);
  synchronize(ctx.device, ctx.stream);
}

// Rows of one prompt: ids from row `first` on, at `positions`, with the features beside them.
void BeamDrafter::run_prompt(const Context& ctx, const DraftPrompt& prompt, int first, int count,
                             const int* positions, const int* row_begin, const Tensor& features) {
  const Step step{.phase = Phase::kPrefill,
                  .ids = prompt.ids + first,
                  .rows = {.num_rows = count,
                           .num_seqs = 1,
                           .max_seq_rows = count,
                           .max_kv = prompt.start + prompt.num_rows,
                           .positions = positions,
                           .row_seqs = prompt.zeros,
                           .seq_slots = prompt.seq_slot,
                           .seq_row_begin = row_begin,
                           .slot_lengths = prompt.draft_lengths,
                           .page_table = prompt.cache->page_table(),
                           .max_pages = prompt.cache->max_pages()}};
  forward(ctx, step, {.x = features}, Source::kTarget, *prompt.cache);
}

void BeamDrafter::prefill(const Context& ctx, const DraftPrompt& prompt) {
  const int n = prompt.num_rows;
  if (!shifted()) {
    run_prompt(ctx, prompt, 0, n, prompt.positions, prompt.item + 4, prompt.features);
    return prompt.set_length(prompt.start + n);
  }
  // Row t holds the feature of token t and the id of token t + 1, at position t: the last row of a
  // chunk waits for the next chunk's first id.
  if (prompt.start > 0) {
    run_prompt(ctx, prompt, 0, 1, prompt.item + 6, prompt.item, prompt.pending_feature);
    prompt.set_length(prompt.start);
  }
  if (n > 1) {
    run_prompt(ctx, prompt, 1, n - 1, prompt.positions, prompt.item + 2,
               prompt.features.rows(0, n - 1));
    prompt.set_length(prompt.start + n - 1);
  }
}

// The cells of what is pending stay as they are, so that later ones lie at their positions: the
// draft's attention finds old or no keys there. That costs acceptance for a while, never text.
void BeamDrafter::skip(const Context& ctx, const DraftBatch& batch) {
  skip_draft(ctx, {.seq_slots = batch.seq_slots,
                   .num_seqs = batch.num_seqs,
                   .pending_counts = batch.state.pending_counts,
                   .draft_lengths = batch.state.draft_lengths});
}

void BeamDrafter::propose(const Context& ctx, const DraftBatch& batch) {
  const int b = batch.num_seqs, k = spec_.topk, pending = max_pending();
  StepRows rows{.num_rows = b * pending,
                .num_seqs = b,
                .max_seq_rows = pending,
                .max_kv = batch.max_kv,
                .positions = sync_positions_,
                .row_seqs = sync_seqs_,
                .seq_slots = batch.seq_slots,
                .seq_row_begin = sync_begin_,
                .slot_lengths = batch.state.draft_lengths,
                .page_table = batch.cache->page_table(),
                .max_pages = batch.cache->max_pages()};

  // Catch up with what was accepted; the last row continues into the tree.
  begin_draft(ctx, {.seq_slots = batch.seq_slots,
                    .num_seqs = b,
                    .max_pending = pending,
                    .pending_ids = batch.state.pending_ids,
                    .pending_counts = batch.state.pending_counts,
                    .draft_lengths = batch.state.draft_lengths,
                    .ids = sync_ids_,
                    .positions = sync_positions_,
                    .row_seqs = sync_seqs_,
                    .feature_rows = sync_features_,
                    .seq_row_begin = sync_begin_,
                    .last_rows = last_rows_});
  const Step sync{.phase = Phase::kDecode, .ids = sync_ids_, .rows = rows};
  const Tensor caught_up =
      forward(ctx, sync, {.x = batch.state.pending_features, .index = sync_features_},
              Source::kTarget, *batch.cache);
  Tensor hidden = last_hidden_.rows(0, b);  // of the draft's last rows
  gather_rows(ctx, {.out = hidden, .x = caught_up, .index = last_rows_});

  DraftBeam beam = beam_;
  beam.num_seqs = b;
  beam.depth = batch.depth;
  const auto expand = [&](int level) {
    const Tensor logits = head(ctx, hidden);
    topk_logprobs(ctx, {.logits = logits,
                        .topk = k,
                        .id_map = id_map_,
                        .tokens = topk_tokens_,
                        .logprobs = topk_logprobs_});
    tree_expand(ctx, {.beam = beam,
                      .level = level,
                      .topk_tokens = topk_tokens_,
                      .topk_logprobs = topk_logprobs_,
                      .seq_slots = batch.seq_slots,
                      .pending_counts = batch.state.pending_counts,
                      .draft_lengths = batch.state.draft_lengths});
  };
  expand(0);
  rows.num_rows = b * k;
  rows.max_seq_rows = k;
  rows.positions = beam.row_positions;
  rows.row_seqs = beam.row_seqs;
  rows.seq_row_begin = beam.seq_row_begin;
  rows.row_masks = beam.row_masks;
  for (int level = 1; level < batch.depth; ++level) {
    rows.first_row = (level - 1) * k;
    const Step step{.phase = Phase::kDecode, .ids = beam.row_ids, .rows = rows};
    hidden = forward(ctx, step, {.x = hidden, .index = beam.row_parents}, Source::kRecycled,
                     *batch.cache);
    expand(level);
  }
  tree_build(
      ctx,
      {.beam = beam, .trees = batch.trees, .seq_slots = batch.seq_slots, .slots = batch.slots});
}

}  // namespace cpmcu
