// The page to read first: what a step is.
#include "engine/engine.h"

#include <algorithm>

#include "kernels/gather_rows.h"
#include "kernels/gemm/gemm.h"
#include "kernels/tree.h"

namespace cpmcu {
// ---- steps

void Engine::prefill(const std::vector<PrefillItem>& items, const WriteLogits& write) {
  int num_rows = 0;
  std::vector<int> sampled_slots;
  CHECK(!items.empty() && static_cast<int>(items.size()) <= config_.max_num_seqs,
        "a prefill step of {} sequences, expected 1 to {}", items.size(), config_.max_num_seqs);
  for (const PrefillItem& item : items) {
    check_slot(item.slot);
    check_ids(item.ids);
    num_rows += static_cast<int>(item.ids.size());
    check_room(item.slot, static_cast<int>(item.ids.size()));
    if (item.last) sampled_slots.push_back(item.slot);
  }
  CHECK(num_rows <= limits_.max_rows, "a prefill step of {} rows, the chunk length is {}", num_rows,
        limits_.max_rows);
  begin_step();
  prefill_inputs_.upload_prefill(ctx_, num_steps_, items, host_lengths_);
  run_prefill(items, num_rows, static_cast<int>(sampled_slots.size()), write);
  for (const PrefillItem& item : items)
    host_lengths_[item.slot] += static_cast<int>(item.ids.size());
  end_step(sampled_slots);
}

void Engine::run_prefill(const std::vector<PrefillItem>& items, int num_rows, int num_sampled,
                         const WriteLogits& write) {
  const StepInputs::Device& inputs = prefill_inputs_.device();
  const Tensor hidden = model_.forward(ctx_, prefill_step(items, num_rows), cache_);
  if (write) read_logits(hidden, write);
  if (num_sampled > 0) {
    const Tensor rows = last_rows_.rows(0, num_sampled);
    gather_rows(ctx_, {.out = rows, .x = hidden, .index = inputs.sampled_rows});
    const Tensor logits = model_.head(ctx_, rows);
    sampler_.draw(ctx_, logits, inputs.sampled_slots, inputs.sampled_positions);
  }
  if (drafter_) draft_prompts(items, hidden);
  finish(inputs, static_cast<int>(items.size()), num_sampled);
  if (drafter_ && num_sampled > 0) {
    seed_pending(ctx_, {.sampled_slots = inputs.sampled_slots,
                        .num_sampled = num_sampled,
                        .tokens = sampler_.tokens(),
                        .max_pending = tokens_per_step(),
                        .pending_ids = draft_state_.pending_ids,
                        .pending_counts = draft_state_.pending_counts});
  }
}

// The drafter sees the prompt, with the target's features beside it, one sequence at a time.
void Engine::draft_prompts(const std::vector<PrefillItem>& items, const Tensor& hidden) {
  const StepInputs::Device& inputs = prefill_inputs_.device();
  const StepInputs::Device pinned = prefill_inputs_.pinned(num_steps_);
  const FeatureKind kind = drafter_->features();
  Tensor features;
  if (kind == FeatureKind::kFinal) {
    features = features_.rows(0, hidden.size(0));
    model_.final_norm(ctx_, features, hidden);
  } else if (kind == FeatureKind::kLayers) {
    features = model_.tapped(static_cast<int>(hidden.size(0)));
  }
  int row = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const int slot = items[i].slot, count = static_cast<int>(items[i].ids.size());
    copy_to_device(ctx_.device,
                   history_ + int64_t{slot} * limits_.max_model_len + host_lengths_[slot],
                   pinned.ids + row, int64_t{4} * count, ctx_.stream);
    DraftPrompt prompt{.start = host_lengths_[slot],
                       .num_rows = count,
                       .ids = inputs.ids + row,
                       .positions = inputs.positions + row,
                       .seq_slot = inputs.seq_slots + i,
                       .zeros = zeros_,
                       .item = inputs.items + i * StepInputs::kItemInts,
                       .draft_lengths = draft_state_.draft_lengths,
                       .cache = &cache_};
    // From the step's own pinned block: it must not change before the copy has run.
    const int* values =
        pinned.items + i * StepInputs::kItemInts + 7;  // start, start + n - 1, start + n
    prompt.set_length = [=, this](int length) {
      const int* value = std::find(values, values + 3, length);
      copy_to_device(ctx_.device, draft_state_.draft_lengths + slot, value, sizeof(int),
                     ctx_.stream);
    };
    if (kind != FeatureKind::kNone) {
      const Tensor pending = draft_state_.pending_features.rows(slot * tokens_per_step(), 1);
      prompt.features = features.rows(row, count);
      prompt.pending_feature = pending;
      drafter_->prefill(ctx_, prompt);
      gather_rows(ctx_, {.out = pending, .x = features.rows(row + count - 1, 1)});
    } else {
      drafter_->prefill(ctx_, prompt);
    }
    row += count;
  }
}

void Engine::decode(const std::vector<int>& slots) {
  int max_kv = 0;
  CHECK(!slots.empty() && static_cast<int>(slots.size()) <= config_.max_num_seqs,
        "a decode step of {} sequences, expected 1 to {}", slots.size(), config_.max_num_seqs);
  for (int slot : slots) {
    check_slot(slot);
    check_room(slot, 1);
    CHECK(host_lengths_[slot] > 0, "slot {} decodes before its prompt was prefilled", slot);
    max_kv = std::max(max_kv, length_bound(slot) + 1 + lookahead());
  }
  begin_step();
  if (slots != decode_slots_) {
    decode_inputs_.upload_slots(ctx_, num_steps_, slots);
    decode_slots_ = slots;
  }
  const GraphRunner::Key key{.num_seqs = static_cast<int>(slots.size()),
                             .max_kv = kv_bucket(max_kv)};
  graphs_->run(key, [&] {
    drafter_ ? run_cycle(key.num_seqs, key.max_kv) : run_decode(key.num_seqs, key.max_kv);
  });
  for (int slot : slots) {
    drafter_ ? slots_[slot].in_flight_tokens += tokens_per_step() : ++host_lengths_[slot];
  }
  end_step(slots, drafter_ != nullptr);
}

// A speculative cycle: draft, verify, sample, accept, compact, publish. Nothing waits for the host.
void Engine::run_cycle(int num_seqs, int max_kv) {
  const StepInputs::Device& inputs = decode_inputs_.device();
  TokenTrees trees = trees_;
  trees.num_seqs = num_seqs;
  const int num_rows = num_seqs * trees.num_nodes;
  drafter_->propose(ctx_, {.num_seqs = num_seqs,
                           .seq_slots = inputs.seq_slots,
                           .max_kv = max_kv,
                           .cache = &cache_,
                           .state = draft_state_,
                           .slots = slot_state(),
                           .trees = trees});
  begin_verify(ctx_, {.trees = trees,
                      .seq_slots = inputs.seq_slots,
                      .lengths = lengths_,
                      .ids = verify_ids_,
                      .positions = verify_positions_,
                      .row_slots = verify_slots_,
                      .row_seqs = verify_seqs_,
                      .seq_row_begin = verify_begin_});
  const Tensor hidden = model_.forward(ctx_, verify_step(trees, max_kv), cache_);
  const Tensor logits = model_.head(ctx_, hidden);
  sampler_.draw(ctx_, logits, verify_slots_, verify_positions_, &trees);
  accept_tree(ctx_, accept_params(trees));
  compact_kv(ctx_, {.pool = cache_.pool(0),
                    .num_kv_heads = spec_.num_key_value_heads,
                    .head_dim = spec_.head_dim,
                    .page_table = cache_.page_table(),
                    .max_pages = cache_.max_pages(),
                    .num_seqs = num_seqs,
                    .max_emitted = tokens_per_step(),
                    .seq_slots = inputs.seq_slots,
                    .lengths = lengths_,
                    .paths = paths_,
                    .num_emitted = num_emitted_});
  if (drafter_->features() != FeatureKind::kNone) {
    const bool final = drafter_->features() == FeatureKind::kFinal;
    gather_rows(ctx_, {.out = draft_state_.pending_features,
                       .x = final ? model_.normed_rows(num_rows) : model_.tapped(num_rows),
                       .index = feature_rows_,
                       .out_index = feature_slots_,
                       .num_rows = num_seqs * tokens_per_step()});
  }
}

void Engine::run_decode(int num_seqs, int max_kv) {
  const StepInputs::Device& inputs = decode_inputs_.device();
  begin_decode(ctx_, {.seq_slots = inputs.seq_slots,
                      .num_seqs = num_seqs,
                      .state = slot_state(),
                      .ids = inputs.ids,
                      .positions = inputs.positions,
                      .row_seqs = inputs.row_seqs,
                      .seq_row_begin = inputs.seq_row_begin});
  const Step step{.phase = Phase::kDecode,
                  .ids = inputs.ids,
                  .rows = step_rows(inputs, num_seqs, num_seqs, 1, max_kv)};
  const Tensor hidden = model_.forward(ctx_, step, cache_);
  const Tensor logits = model_.head(ctx_, hidden);
  sampler_.draw(ctx_, logits, inputs.seq_slots, inputs.positions);
  finish(inputs, num_seqs, num_seqs);
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

std::vector<Engine::SlotOutput> Engine::collect() {
  CHECK_STATE(!pending_.empty(), "no step is in flight");
  const PendingStep step = pending_.front();
  ring_.wait(ctx_, step.number);
  ++num_waits_;
  pending_.pop_front();
  std::vector<SlotOutput> outputs;
  for (size_t i = 0; i < step.sampled.size(); ++i) {
    const auto [slot, generation] = step.sampled[i];
    if (slots_[slot].generation != generation) continue;  // released meanwhile
    const SlotResult& result = ring_.entry(step.number)[i];
    if (step.cycle) {
      host_lengths_[slot] += result.num_tokens;
      slots_[slot].in_flight_tokens -= tokens_per_step();
    }
    SlotOutput output{.slot = slot,
                      .num_logprobs = slots_[slot].num_logprobs,
                      .finished = step.cycle && result.finished != 0};
    output.tokens.assign(result.tokens, result.tokens + result.num_tokens);
    if (output.num_logprobs >= 0) {
      output.logprobs.assign(result.logprobs, result.logprobs + result.num_tokens);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void Engine::prompt_logits(const std::vector<int>& ids, const WriteLogits& write) {
  check_ids(ids);
  const int slot = add_sequence({}, {}, 0);
  const auto run = [&] {
    const int total = static_cast<int>(ids.size());
    CHECK(total <= limits_.max_model_len, "the prompt has {} tokens, the engine holds {}", total,
          limits_.max_model_len);
    CHECK(reserve(slot, total), "the prompt has {} tokens, {} KV pages of {} are free", total,
          num_free_pages(), kPageSize);
    for (int begin = 0; begin < total; begin += limits_.max_rows) {
      const int count = std::min(limits_.max_rows, total - begin);
      const std::vector<PrefillItem> items{
          {.slot = slot, .ids = {ids.begin() + begin, ids.begin() + begin + count}}};
      prefill_inputs_.upload_prefill(ctx_, num_steps_, items, host_lengths_);
      const Tensor hidden = model_.forward(ctx_, prefill_step(items, count), cache_);
      read_logits(hidden,
                  [&](int row, int rows, const float* data) { write(begin + row, rows, data); });
      host_lengths_[slot] += count;
      copy_to_device(ctx_.device, lengths_ + slot, &host_lengths_[slot], sizeof(int), ctx_.stream);
      synchronize(ctx_.device, ctx_.stream);
    }
  };
  try {
    run();
  } catch (...) {
    release(slot);
    throw;
  }
  release(slot);
}

void Engine::read_logits(const Tensor& hidden, const WriteLogits& write) {
  const int num_rows = static_cast<int>(hidden.size(0));
  std::vector<float> host(size_t{kMaxSkinnyRows} * spec_.vocab_size);
  for (int row = 0; row < num_rows; row += kMaxSkinnyRows) {
    const int rows = std::min(kMaxSkinnyRows, num_rows - row);
    const Tensor logits = model_.head(ctx_, hidden.rows(row, rows));
    copy_to_host(ctx_.device, host.data(), logits.data(), logits.num_bytes(), ctx_.stream);
    synchronize(ctx_.device, ctx_.stream);
    write(row, rows, host.data());
  }
}

// ---- steps: helpers

void Engine::begin_step() {
  CHECK_STATE(ready_, "the engine has no weights yet: load them and call finish_loading");
  CHECK_STATE(in_flight() < kMaxInFlight, "{} steps are in flight; collect one first", in_flight());
  set_device(ctx_.device);
  if (!ctx_.device.is_cuda()) set_num_threads(config_.num_threads);
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

Step Engine::verify_step(const TokenTrees& trees, int max_kv) const {
  const int num_rows = trees.num_seqs * trees.num_nodes;
  StepInputs::Device inputs{};
  inputs.positions = verify_positions_;
  inputs.row_seqs = verify_seqs_;
  inputs.seq_slots = decode_inputs_.device().seq_slots;
  inputs.seq_row_begin = verify_begin_;
  Step step{.phase = Phase::kDecode,
            .ids = verify_ids_,
            .verify = true,
            .rows = step_rows(inputs, num_rows, trees.num_seqs, trees.num_nodes, max_kv)};
  step.rows.row_masks = trees.masks;
  return step;
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
          .feature_rows = feature_rows_,
          .feature_slots = feature_slots_,
          .results = ring_.results(),
          .ring_size = ring_.ring_size(),
          .max_seqs = ring_.max_seqs(),
          .ticket = ring_.ticket(),
          .done = ring_.done()};
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

// ---- sequences

int Engine::add_sequence(const SamplingConfig& sampling, const std::vector<int>& ids,
                         int num_prompt) {
  const auto it = std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.used; });
  CHECK_STATE(it != slots_.end(), "all {} sequence slots are taken", slots_.size());
  if (!ids.empty()) check_ids(ids);
  set_device(ctx_.device);
  const int slot = static_cast<int>(it - slots_.begin());
  sampler_.reset(ctx_, slot_state(), slot, sampling, ids, num_prompt);
  it->used = true;
  ++it->generation;
  it->num_logprobs = sampling.logprobs;
  it->in_flight_tokens = 0;
  host_lengths_[slot] = 0;
  if (drafter_) {
    const int room = limits_.max_model_len - static_cast<int>(ids.size());
    SlotStop& stop = stops_mirror_[slot];
    stop = {.max_tokens = std::min(sampling.max_tokens, room) - 1};  // the prefill emits the first
    for (int id : sampling.stop_ids) {  // the host sees to those beyond the table
      if (stop.num_stop_ids < kMaxStopIds) stop.stop_ids[stop.num_stop_ids++] = id;
    }
    copy_to_device(ctx_.device, stops_ + slot, &stop, sizeof(SlotStop), ctx_.stream);
    fill_bytes(ctx_.device, draft_state_.draft_lengths + slot, 0, sizeof(int), ctx_.stream);
  }
  return slot;
}

void Engine::release(int slot) {
  check_slot(slot);
  slots_[slot].used = false;
  ++slots_[slot].generation;
  cache_.release(slot);
}

bool Engine::reserve(int slot, int num_tokens) {
  check_slot(slot);
  CHECK(num_tokens <= limits_.max_model_len,
        "{} tokens were asked for, the engine holds {} a sequence", num_tokens,
        limits_.max_model_len);
  set_device(ctx_.device);
  return cache_.reserve(ctx_, slot, num_tokens + lookahead());
}

}  // namespace cpmcu
