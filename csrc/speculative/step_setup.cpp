// Construction of a speculative step: the drafter, the memory.
#include "speculative/step.h"

namespace cpmcu {

SpeculativeStep::SpeculativeStep(const Target& target, const DrafterSpec* spec) : target_(target) {
  if (spec == nullptr) return;
  method_ = spec->method;
  drafter_ = make_drafter(*spec, target_.spec);
  needs_ = drafter_->needs();
  largest_ = drafter_->largest();
  max_path_ = drafter_->num_recent(largest_.depth);
}

SpeculativeStep::~SpeculativeStep() {
  if (stops_staging_ != nullptr) release_pinned(device_, stops_staging_);
  if (trees_staging_ != nullptr) release_pinned(device_, trees_staging_);
}

void SpeculativeStep::layout(Carver& carver) {
  const int64_t slots = limits_.max_slots, nodes = limits_.max_seqs * largest_.tree_size;
  const auto ints = [&](int64_t count) { return carver.take<int>(count); };
  trees_ = {.num_seqs = limits_.max_seqs,
            .num_nodes = largest_.tree_size,
            .tokens = ints(nodes),
            .parents = ints(nodes),
            .depths = ints(nodes),
            .masks = carver.take<uint64_t>(nodes),
            .token_ids = ints(nodes),
            .token_positions = ints(nodes),
            .token_slots = ints(nodes),
            .token_seqs = ints(nodes),
            .seq_token_begin = ints(limits_.max_seqs + 1)};
  stops_ = carver.take<SlotStop>(slots);
  slots_ = {.lengths = ints(slots),
            .next_tokens = ints(slots),
            .num_shared = ints(slots),
            .max_len = limits_.max_tokens,
            .vocab_size = target_.spec.vocab_size,
            .accepted = {.max_path = max_path(),
                         .ids = ints(slots * max_path()),
                         .paths = ints(slots * max_path()),
                         .counts = ints(slots)}};
}

void SpeculativeStep::plan(MemoryPlan& plan, ModelState& state, StateCache& states,
                           const SpeculativeStepLimits& limits) {
  limits_ = limits;
  state_ = &state, states_ = &states;
  max_path_ = std::max(max_path_, limits.max_path);
  CHECK(max_path_ <= kMaxTreeSize, "the drafter reads {} tokens again, expected at most {}",
        max_path_, kMaxTreeSize);
  const std::string scope = limits.scope + "step.";
  num_bytes_ = carved_bytes([&](Carver& c) { layout(c); });
  buffer_id_ = plan.add(scope + "arrays", "state", num_bytes_);
  if (!drafter_) return;
  history_id_ =
      plan.add(scope + "history", "state", int64_t{4} * limits.max_slots * limits.max_tokens);
  const int64_t row_bytes = int64_t{target_.spec.hidden_size} * size_of(target_.spec.dtype);
  const int64_t accepted_rows = int64_t{limits.max_slots} * max_path();
  if (needs_.final) {
    final_id_ = plan.add_scratch("final_hidden", limits.max_prompt_tokens * row_bytes, 0, kSample);
    accepted_final_id_ = plan.add(scope + "accepted_final", "state", accepted_rows * row_bytes);
  }
  if (!needs_.layers.empty()) {
    accepted_layers_id_ =
        plan.add(scope + "accepted_layers", "state",
                 accepted_rows * row_bytes * static_cast<int64_t>(needs_.layers.size()));
  }
  drafter_->plan(plan, states,
                 {.max_seqs = limits.max_seqs,
                  .max_slots = limits.max_slots,
                  .max_prompt_tokens = limits.max_prompt_tokens,
                  .max_kv = limits.max_kv,
                  .max_path = max_path(),
                  .compute_capability = limits.compute_capability});
}

void SpeculativeStep::bind(const Arena& arena) {
  buffer_ = arena.array<char>(buffer_id_);
  Carver carver(buffer_);
  layout(carver);
  slots_.counts = target_.sampler.counts();
  if (!drafter_) return;
  if (limits_.max_tokens > 0) slots_.history = arena.array<int>(history_id_);
  const DType dtype = target_.spec.dtype;
  const int64_t width = target_.spec.hidden_size;
  const int64_t accepted_rows = int64_t{limits_.max_slots} * max_path();
  if (needs_.final) {
    final_ = arena.tensor(final_id_, dtype, {limits_.max_prompt_tokens, width});
    accepted_.final = arena.tensor(accepted_final_id_, dtype, {accepted_rows, width});
  }
  if (!needs_.layers.empty()) {
    const int64_t columns = width * static_cast<int64_t>(needs_.layers.size());
    accepted_.layers = arena.tensor(accepted_layers_id_, dtype, {accepted_rows, columns});
  }
  drafter_->bind(arena);
}

void SpeculativeStep::clear(const Context& ctx) {
  device_ = ctx.device;
  fill_bytes(ctx.device, buffer_, 0, num_bytes_, ctx.stream);
  const auto bytes = static_cast<int64_t>(sizeof(SlotStop)) * limits_.max_slots;
  stops_staging_ = static_cast<SlotStop*>(allocate_pinned(ctx.device, bytes));
  const int64_t nodes = int64_t{limits_.max_seqs} * largest_.tree_size;
  trees_staging_ = static_cast<int*>(allocate_pinned(ctx.device, 2 * 4 * nodes));
  trees_ready_.emplace(ctx.device);
  // Rows after the accepted tokens are padding. Attention masks them, but a NaN in them would reach
  // the draft's KV cache.
  for (const Tensor& rows : {accepted_.final, accepted_.layers}) {
    if (!rows.empty()) fill_bytes(ctx.device, rows.data(), 0, rows.num_bytes(), ctx.stream);
  }
}

void SpeculativeStep::list_tensors(WeightTable& table) const {
  if (drafter_) drafter_->list_tensors(table);
}

void SpeculativeStep::finish_loading(const Context& ctx) {
  if (!drafter_) return;
  const Transformer& model = target_.model;
  drafter_->finish_loading(
      ctx, {.embedding_table = model.embedding_table(),
            .head_weight = model.head_weight(),
            .project = [&model](const Context& on, const Tensor& logits, const Tensor& hidden,
                                float scale) { model.project(on, logits, hidden, scale); }});
}

}  // namespace cpmcu
