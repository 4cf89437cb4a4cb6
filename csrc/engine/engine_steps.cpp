// What steps have in common: their beginning and end, their rows, what is checked before them.
#include <algorithm>

#include "engine/engine.h"

namespace cpmcu {

void Engine::check_ready() const {
  CHECK_STATE(ready_, "the engine has no weights yet: load them and call finish_loading");
}

void Engine::begin_step() {
  check_ready();
  CHECK_STATE(in_flight() < kMaxInFlight, "{} steps are in flight; collect one first", in_flight());
  set_device(ctx_.device);
  if (!ctx_.device.is_cuda()) set_num_threads(config_.num_threads);
  half_done_.clear();
}

void Engine::end_step(const std::vector<int>& sampled_slots, bool cycle) {
  PendingStep step{.number = num_steps_++, .cycle = cycle};
  for (int slot : sampled_slots) step.sampled.emplace_back(slot, slots_[slot].generation);
  pending_.push_back(std::move(step));
}

StepRows Engine::step_rows(const StepInputs::Device& inputs, int num_rows, int num_seqs,
                           int max_seq_rows, int max_kv) const {
  return {.num_rows = num_rows,
          .num_seqs = num_seqs,
          .max_seq_rows = max_seq_rows,
          .max_kv = max_kv,
          .positions = inputs.positions,
          .row_seqs = inputs.row_seqs,
          .seq_slots = inputs.seq_slots,
          .seq_row_begin = inputs.seq_row_begin,
          .slot_lengths = lengths_,
          .page_table = cache_.page_table(),
          .max_pages = cache_.max_pages()};
}

GraphRunner::Key Engine::begin_decode_step(const std::vector<int>& slots, const DraftShape& shape) {
  int max_kv = 0;
  check_shape(shape);
  CHECK(!slots.empty() && static_cast<int>(slots.size()) <= config_.max_num_seqs,
        "a decode step of {} sequences, expected 1 to {}", slots.size(), config_.max_num_seqs);
  for (int slot : slots) {
    check_slot(slot);
    check_room(slot, 1);
    CHECK(host_lengths_[slot] > 0, "slot {} decodes before its prompt was prefilled", slot);
    max_kv = std::max(max_kv, length_bound(slot) + 1 + lookahead());
  }
  begin_step();
  shape_ = shape;
  if (slots != decode_slots_) {
    decode_inputs_.upload_slots(ctx_, num_steps_, slots);
    decode_slots_ = slots;
  }
  return {.num_seqs = static_cast<int>(slots.size()), .max_kv = kv_bucket(max_kv), .shape = shape};
}

void Engine::end_decode_step(const std::vector<int>& slots) {
  for (int slot : slots) {
    drafter_ ? slots_[slot].in_flight_tokens += tokens_per_step() : ++host_lengths_[slot];
  }
  end_step(slots, drafter_ != nullptr);
}

void Engine::publish_trees(int num_seqs) {
  const int count = num_seqs * shape_.tree_size;
  copy_to_host(ctx_.device, trees_mirror_, trees_.tokens, int64_t{4} * count, ctx_.stream);
  copy_to_host(ctx_.device, trees_mirror_ + count, trees_.parents, int64_t{4} * count, ctx_.stream);
  trees_ready_->record(ctx_.stream);
}

// The one place where a step waits for the device: for its draft, not for its forward pass.
std::vector<Engine::DraftedTree> Engine::read_trees(int num_seqs) const {
  if (!drafter_) return std::vector<DraftedTree>(num_seqs, {.tokens = {0}, .parents = {-1}});
  trees_ready_->wait();
  const int num_nodes = shape_.tree_size, count = num_seqs * num_nodes;
  const int *tokens = trees_mirror_, *parents = trees_mirror_ + count;
  std::vector<DraftedTree> trees;
  for (int node = 0; node < count; node += num_nodes) {
    trees.push_back({.tokens = {tokens + node, tokens + node + num_nodes},
                     .parents = {parents + node, parents + node + num_nodes}});
  }
  return trees;
}

// Steps in flight may have masks on their way from the same memory.
void Engine::upload_masks(const TokenMasks& masks, int num_rows) {
  if (!pending_.empty()) ring_.wait(ctx_, pending_.back().number);
  sampler_.upload_masks(ctx_, masks, num_rows);
}

TokenTrees Engine::trees_of(int num_seqs) const {
  TokenTrees trees = trees_;
  trees.num_seqs = num_seqs;
  trees.num_nodes = shape_.tree_size;
  return trees;
}

Step Engine::decode_step(int num_seqs, int max_kv) const {
  const StepInputs::Device& inputs = decode_inputs_.device();
  return {.phase = Phase::kDecode,
          .ids = inputs.ids,
          .rows = step_rows(inputs, num_seqs, num_seqs, 1, max_kv)};
}

Step Engine::verify_step(const TokenTrees& trees, int max_kv) const {
  const int num_rows = trees.num_seqs * trees.num_nodes;
  StepInputs::Device inputs{};
  inputs.positions = trees.row_positions;
  inputs.row_seqs = trees.row_seqs;
  inputs.seq_slots = decode_inputs_.device().seq_slots;
  inputs.seq_row_begin = trees.seq_row_begin;
  Step step{.phase = Phase::kDecode,
            .ids = trees.row_ids,
            .verify = trees.num_nodes > 1,
            .rows = step_rows(inputs, num_rows, trees.num_seqs, trees.num_nodes, max_kv)};
  if (step.verify) step.rows.row_masks = trees.masks;
  return step;
}

BeginDecodeParams Engine::begin_params(int num_seqs) const {
  const StepInputs::Device& inputs = decode_inputs_.device();
  return {.seq_slots = inputs.seq_slots,
          .num_seqs = num_seqs,
          .state = slot_state(),
          .ids = inputs.ids,
          .positions = inputs.positions,
          .row_seqs = inputs.row_seqs,
          .seq_row_begin = inputs.seq_row_begin};
}

DraftBatch Engine::draft_batch(int num_seqs, int max_kv) const {
  return {.num_seqs = num_seqs,
          .depth = shape_.depth,
          .seq_slots = decode_inputs_.device().seq_slots,
          .max_kv = max_kv,
          .cache = &cache_,
          .state = draft_state_,
          .slots = slot_state(),
          .trees = trees_of(num_seqs)};
}

AcceptTreeParams Engine::accept_params(const TokenTrees& trees) const {
  return {.trees = trees,
          .max_emitted = tokens_per_step(),
          .drawn = sampler_.tokens(),
          .logprobs = sampler_.logprobs(),
          .seq_slots = decode_inputs_.device().seq_slots,
          .sampling = sampler_.sampling(),
          .state = slot_state(),
          .stops = stops_,
          .paths = paths_,
          .num_emitted = num_emitted_,
          .pending_ids = draft_state_.pending_ids,
          .pending_counts = draft_state_.pending_counts,
          .results = ring_.results(),
          .ring_size = ring_.ring_size(),
          .max_seqs = ring_.max_seqs(),
          .ticket = ring_.ticket(),
          .done = ring_.done()};
}

KeepAcceptedParams Engine::keep_params(const TokenTrees& trees) const {
  const int num_rows = trees.num_seqs * trees.num_nodes;
  Tensor features;
  if (drafter_->features() == FeatureKind::kFinal) features = model_.normed_rows(num_rows);
  if (drafter_->features() == FeatureKind::kLayers) features = model_.tapped(num_rows);
  return {.pool = cache_.pool(0),
          .num_kv_heads = spec_.num_key_value_heads,
          .head_dim = spec_.head_dim,
          .page_table = cache_.page_table(),
          .max_pages = cache_.max_pages(),
          .num_seqs = trees.num_seqs,
          .num_nodes = trees.num_nodes,
          .max_emitted = tokens_per_step(),
          .seq_slots = decode_inputs_.device().seq_slots,
          .lengths = lengths_,
          .paths = paths_,
          .num_emitted = num_emitted_,
          .features = features,
          .pending_features = draft_state_.pending_features};
}

// Grows the sequences by the step's rows, keeps the drawn tokens as the next inputs, publishes
// them.
void Engine::finish(const StepInputs::Device& inputs, int num_seqs, int num_sampled) {
  finish_step(ctx_, {.seq_slots = inputs.seq_slots,
                     .seq_row_begin = inputs.seq_row_begin,
                     .num_seqs = num_seqs,
                     .sampled_seqs = inputs.sampled_seqs,
                     .num_sampled = num_sampled,
                     .tokens = sampler_.tokens(),
                     .logprobs = sampler_.logprobs(),
                     .sampling = sampler_.sampling(),
                     .state = slot_state(),
                     .results = ring_.results(),
                     .ring_size = ring_.ring_size(),
                     .max_seqs = ring_.max_seqs(),
                     .ticket = ring_.ticket(),
                     .done = ring_.done()});
}

// A bound of the slot's length once the steps in flight are done.
int Engine::length_bound(int slot) const {
  return std::min(host_lengths_[slot] + slots_[slot].in_flight_tokens, limits_.max_model_len);
}

// Cells beyond its tokens that a sequence needs during a step: the tree that is verified, and in
// the draft's cache the rows that catch up and the levels of the tree.
int Engine::lookahead() const {
  if (!draft_) return 0;
  return std::max(draft_->tree_size, draft_->depth + 1 + draft_->topk * (draft_->depth - 1));
}

Step Engine::prefill_step(const std::vector<PrefillItem>& items, int num_rows) const {
  int max_seq_rows = 0, max_kv = 0;
  for (const PrefillItem& item : items) {
    const int rows = static_cast<int>(item.ids.size());
    max_seq_rows = std::max(max_seq_rows, rows);
    max_kv = std::max(max_kv, host_lengths_[item.slot] + rows);
  }
  const StepInputs::Device& inputs = prefill_inputs_.device();
  return {
      .phase = Phase::kPrefill,
      .ids = inputs.ids,
      .rows = step_rows(inputs, num_rows, static_cast<int>(items.size()), max_seq_rows, max_kv)};
}

// Graphs are kept per power of two of the longest sequence, from 1024 up.
int Engine::kv_bucket(int num_cells) const {
  int bucket = 1024;
  while (bucket < num_cells) bucket *= 2;
  return std::min(bucket, cache_.max_pages() * kPageSize);
}

void Engine::check_shape(const DraftShape& shape) const {
  const DraftShape most = max_shape();
  CHECK(shape.depth >= 0 && shape.depth <= most.depth && shape.tree_size >= 1 &&
            shape.tree_size <= most.tree_size,
        "a decode step of depth {} and {} nodes, expected a depth of 0 to {} and 1 to {} nodes",
        shape.depth, shape.tree_size, most.depth, most.tree_size);
  const int nodes = shape.depth == 0 ? 1 : 1 + num_candidates(draft_->topk, shape.depth);
  CHECK(shape.tree_size <= nodes, "a decode step of depth {} and {} nodes, but it drafts only {}",
        shape.depth, shape.tree_size, nodes - 1);
}

void Engine::check_slot(int slot) const {
  CHECK(slot >= 0 && slot < config_.max_num_seqs && slots_[slot].used, "slot {} holds no sequence",
        slot);
}

void Engine::check_ids(const std::vector<int>& ids) const {
  CHECK(!ids.empty(), "a prompt chunk has no tokens");
  for (int id : ids) {
    CHECK(id >= 0 && id < spec_.vocab_size, "token id {} is outside the vocabulary of {}", id,
          spec_.vocab_size);
  }
}

void Engine::check_room(int slot, int num_rows) const {
  const int length = host_lengths_[slot];
  CHECK(length + num_rows <= limits_.max_model_len,
        "slot {} holds {} tokens and {} more were asked for; the engine holds {} a sequence", slot,
        length, num_rows, limits_.max_model_len);
  const int need = std::max(length + num_rows, length_bound(slot)) + lookahead();
  CHECK(need <= cache_.capacity(slot),
        "slot {} has pages for {} tokens and needs {}; reserve them first", slot,
        std::max(0, cache_.capacity(slot) - lookahead()), need - lookahead());
}

SlotState Engine::slot_state() const {
  return {.lengths = lengths_,
          .next_tokens = next_tokens_,
          .counts = sampler_.counts(),
          .history = history_,
          .max_len = limits_.max_model_len,
          .vocab_size = spec_.vocab_size};
}

}  // namespace cpmcu
