#include "speculative/beam_drafter.h"

#include <algorithm>

#include "kernels/layer/gather_rows.h"

namespace cpmcu {

BeamDrafter::BeamDrafter(const DrafterSpec& spec, const ModelSpec& target)
    : spec_(spec),
      target_(target),
      topk_(spec.options.integer("topk", 1)),
      largest_{spec.shape.depth,
               std::min(spec.shape.tree_size, 1 + num_candidates(topk_, spec.shape.depth))},
      vocab_ids_(spec.options.integers("vocab_ids")) {
  CHECK(topk_ >= 1 && topk_ <= kMaxTopk, "the draft's top-k is {}, expected 1 to {}", topk_,
        kMaxTopk);
  const int num_rows = topk_ * (largest_.depth - 1);
  CHECK(num_rows <= kMaxTreeSize,
        "top-k {} x (depth {} - 1) is {} drafted tokens, the tree masks hold at most {}", topk_,
        largest_.depth, num_rows, kMaxTreeSize);
  CHECK(spec_.model.has_value(), "the drafter \"{}\" has no model, expected the draft's own layers",
        spec_.method);
  for (int id : vocab_ids_) {
    CHECK(id >= 0 && id < target.vocab_size,
          "the draft vocabulary names token {}, the target's vocabulary has {}", id,
          target.vocab_size);
  }
}

DraftShape BeamDrafter::shrunk(const DraftShape& limit) const {
  const int depth = std::min(limit.depth, largest_.depth);
  if (depth < 1) return {};
  return {depth, std::min({limit.tree_size, largest_.tree_size, most_nodes(depth)})};
}

StepLimits BeamDrafter::step_limits() const {
  const int decode_tokens = limits_.max_seqs * most_rows();
  return {.max_tokens = std::max(limits_.max_prompt_tokens, decode_tokens),
          .max_decode_tokens = decode_tokens,
          .max_kv = limits_.max_kv,
          .compute_capability = limits_.compute_capability};
}

void BeamDrafter::plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) {
  limits_ = limits;
  state_ = &states.add_model(spec_.scope, /*has_gaps=*/true);
  buffer_id_ =
      plan.add(spec_.scope + "arrays", "state", carved_bytes([&](Carver& c) { layout(c); }));
  last_id_ = plan.add(spec_.scope + "last_hidden", "state",
                      int64_t{limits.max_seqs} * model().hidden_size * size_of(model().dtype));
  map_id_ = plan.add(spec_.scope + "id_map", "state", static_cast<int64_t>(4 * vocab_ids_.size()));
}

void BeamDrafter::layout(Carver& carver) {
  const int64_t b = limits_.max_seqs, k = topk_, path = max_path();
  const int64_t candidates = num_candidates(topk_, largest_.depth);
  const int64_t tokens = std::min<int64_t>(candidates, kMaxTreeSize - 1);
  const auto ints = [&](int64_t count) { return carver.take<int>(count); };
  beam_ = {.num_seqs = limits_.max_seqs,
           .topk = topk_,
           .depth = largest_.depth,
           .scores = carver.take<float>(b * candidates),
           .tokens = ints(b * candidates),
           .level_candidates = ints(b * largest_.depth * k),
           .token_scores = carver.take<float>(b * k),
           .ancestor_masks = carver.take<uint64_t>(b * k),
           .token_ids = ints(b * k),
           .token_parents = ints(b * k),
           .token_positions = ints(b * k),
           .token_seqs = ints(b * k),
           .seq_token_begin = ints(b + 1)};
  draft_ = {.tokens = ints(b * tokens),
            .parents = ints(b * tokens),
            .scores = carver.take<float>(b * tokens)};
  topk_tokens_ = ints(b * k * k);
  topk_logprobs_ = carver.take<float>(b * k * k);
  draft_lengths_ = ints(limits_.max_slots);
  ids_ = ints(b * path);
  positions_ = ints(b * path);
  token_seqs_ = ints(b * path);
  hidden_rows_ = ints(b * path);
  seq_token_begin_ = ints(b + 1);
  last_rows_ = ints(b);
  if (!shifted()) return;
  const auto rows = [&](int64_t count) -> ShiftPromptParams::Launch {
    return {.ids = ints(count),
            .positions = ints(count),
            .token_seqs = ints(count),
            .hidden_rows = ints(count),
            .seq_token_begin = ints(b + 1)};
  };
  shift_ = {.max_path = max_path(),
            .first = rows(b),
            .first_lengths = ints(limits_.max_slots),
            .rest = rows(limits_.max_prompt_tokens)};
}

void BeamDrafter::bind(const Arena& arena) {
  Carver carver(arena.array<char>(buffer_id_));
  layout(carver);
  last_hidden_ = arena.tensor(last_id_, model().dtype, {limits_.max_seqs, model().hidden_size});
  if (!vocab_ids_.empty()) id_map_ = arena.array<int>(map_id_);
}

void BeamDrafter::finish_loading(const Context& ctx, const TargetParts&) {
  copy_to_device(ctx.device, id_map_, vocab_ids_.data(),
                 static_cast<int64_t>(4 * vocab_ids_.size()), ctx.stream);
  synchronize(ctx.device, ctx.stream);
}

// ---- prompts

void BeamDrafter::prefill(const Context& ctx, const DraftPrompt& prompt) {
  if (shifted()) return prefill_shifted(ctx, prompt);
  forward(ctx, {.phase = Phase::kPrefill, .ids = prompt.ids, .tokens = prompt.tokens},
          {.x = select_hidden(prompt.hidden)}, Source::kTarget);
}

void BeamDrafter::prefill_shifted(const Context& ctx, const DraftPrompt& prompt) {
  ShiftPromptParams shift = shift_;
  shift.num_seqs = prompt.tokens.num_seqs;
  shift.num_tokens = prompt.tokens.num_tokens;
  shift.ids = prompt.ids;
  shift.token_seqs = prompt.tokens.token_seqs;
  shift.seq_slots = prompt.tokens.seq_slots;
  shift.seq_token_begin = prompt.tokens.seq_token_begin;
  shift.lengths = prompt.tokens.slot_lengths;
  shift.num_shared = prompt.slots.num_shared;
  shift_prompt(ctx, shift);
  const auto run = [&](const ShiftPromptParams::Launch& shifted, int num_tokens, int max_seq_tokens,
                       const int* lengths, const Tensor& hidden) {
    if (num_tokens == 0) return;
    StepTokens tokens = prompt.tokens;
    tokens.num_tokens = num_tokens;
    tokens.max_seq_tokens = max_seq_tokens;
    tokens.positions = shifted.positions;
    tokens.token_seqs = shifted.token_seqs;
    tokens.seq_token_begin = shifted.seq_token_begin;
    tokens.slot_lengths = lengths;
    // If there is one sequence, the hidden states of the chunk are in order already.
    const bool in_order = shift.num_seqs == 1 && lengths == shift.lengths;
    forward(ctx, {.phase = Phase::kPrefill, .ids = shifted.ids, .tokens = tokens},
            {.x = in_order ? hidden.rows(0, num_tokens) : hidden,
             .index = in_order ? nullptr : shifted.hidden_rows},
            Source::kTarget);
  };
  if (std::ranges::any_of(prompt.num_before, [](int count) { return count > 0; })) {
    run(shift.first, shift.num_seqs, 1, shift.first_lengths, select_hidden(prompt.accepted));
  }
  run(shift.rest, shift.num_tokens - shift.num_seqs, prompt.tokens.max_seq_tokens, shift.lengths,
      select_hidden(prompt.hidden));
}

// ---- drafting

StepTokens BeamDrafter::step_of(const DraftBatch& batch) const {
  StepTokens tokens = batch.step_tokens();
  tokens.slot_lengths = draft_lengths_;
  return tokens;
}

Tensor BeamDrafter::process_accepted(const Context& ctx, const DraftBatch& batch) {
  begin_draft(ctx, {.seq_slots = batch.seq_slots,
                    .num_seqs = batch.num_seqs,
                    .lengths = batch.slots.lengths,
                    .accepted = batch.slots.accepted,
                    .shifted = shifted(),
                    .draft_lengths = draft_lengths_,
                    .ids = ids_,
                    .positions = positions_,
                    .token_seqs = token_seqs_,
                    .hidden_rows = hidden_rows_,
                    .seq_token_begin = seq_token_begin_,
                    .last_rows = last_rows_});
  StepTokens tokens = step_of(batch);
  tokens.num_tokens = batch.num_seqs * max_path();
  tokens.max_seq_tokens = max_path();
  tokens.positions = positions_;
  tokens.token_seqs = token_seqs_;
  tokens.seq_token_begin = seq_token_begin_;
  const Tensor hidden =
      forward(ctx, {.phase = Phase::kDecode, .ids = ids_, .tokens = tokens},
              {.x = select_hidden(batch.accepted), .index = hidden_rows_}, Source::kTarget);
  const Tensor last = last_hidden_.rows(0, batch.num_seqs);
  gather_rows(ctx, {.out = last, .x = hidden, .index = last_rows_});
  return last;
}

Draft BeamDrafter::propose(const Context& ctx, const DraftBatch& batch) {
  const int b = batch.num_seqs, k = width_of(batch.shape);
  Tensor hidden = process_accepted(ctx, batch);

  const DraftBeam beam = beam_of(batch);
  expand(ctx, batch, 0, hidden);
  StepTokens tokens = step_of(batch);
  tokens.num_tokens = b * k;
  tokens.max_seq_tokens = k;
  tokens.positions = beam.token_positions;
  tokens.token_seqs = beam.token_seqs;
  tokens.seq_token_begin = beam.seq_token_begin;
  tokens.ancestor_masks = beam.ancestor_masks;
  for (int level = 1; level < batch.shape.depth; ++level) {
    tokens.first_token = (level - 1) * k;
    const Step step{.phase = Phase::kDecode, .ids = beam.token_ids, .tokens = tokens};
    hidden = forward(ctx, step, {.x = hidden, .index = beam.token_parents}, Source::kRecycled);
    expand(ctx, batch, level, hidden);
  }
  return select(ctx, batch);
}

DraftBeam BeamDrafter::beam_of(const DraftBatch& batch) const {
  DraftBeam beam = beam_;
  beam.num_seqs = batch.num_seqs;
  beam.topk = width_of(batch.shape);
  beam.depth = batch.shape.depth;
  return beam;
}

void BeamDrafter::expand(const Context& ctx, const DraftBatch& batch, int level,
                         const Tensor& hidden) {
  topk_logprobs(ctx, {.logits = head(ctx, hidden),
                      .topk = width_of(batch.shape),
                      .id_map = id_map_,
                      .tokens = topk_tokens_,
                      .logprobs = topk_logprobs_});
  tree_expand(ctx, {.beam = beam_of(batch),
                    .level = level,
                    .topk_tokens = topk_tokens_,
                    .topk_logprobs = topk_logprobs_,
                    .seq_slots = batch.seq_slots,
                    .accepted_counts = batch.slots.accepted.counts,
                    .draft_lengths = draft_lengths_});
}

Draft BeamDrafter::select(const Context& ctx, const DraftBatch& batch) {
  Draft draft = draft_;
  draft.num_tokens =
      std::min(batch.num_tokens(), num_candidates(width_of(batch.shape), batch.shape.depth));
  draft_select(ctx, {.beam = beam_of(batch), .draft = draft});
  return draft;
}

}  // namespace cpmcu
