// The page to read first: what a decode step is, and below it what a prompt's is.
#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "kernels/gather_rows.h"
#include "kernels/gemm/gemm.h"
#include "kernels/tree.h"

namespace cpmcu {

// ---- decoding: what `run` is given becomes one CUDA graph

void Engine::decode(const std::vector<int>& slots, std::optional<DraftShape> shape) {
  const GraphRunner::Key key = begin_decode_step(slots, shape.value_or(max_shape()));
  graphs_->run(key, [&] {
    propose(key.num_seqs, key.max_kv);
    verify(key.num_seqs, key.max_kv);
    accept(key.num_seqs, /*masked=*/false);
  });
  end_decode_step(slots);
}

// The rows of the step: of each sequence a tree of drafted tokens, or its last token alone.
void Engine::propose(int num_seqs, int max_kv) {
  if (!drafter_) return begin_decode(ctx_, begin_params(num_seqs));
  const DraftBatch batch = draft_batch(num_seqs, max_kv);
  if (shape_.depth > 0) return drafter_->propose(ctx_, batch);
  drafter_->skip(ctx_, batch);
  chain_build(ctx_, {.trees = batch.trees, .seq_slots = batch.seq_slots, .slots = batch.slots});
}

// The target runs over all rows, up to their logits.
void Engine::verify(int num_seqs, int max_kv) {
  const Step step =
      drafter_ ? verify_step(trees_of(num_seqs), max_kv) : decode_step(num_seqs, max_kv);
  model_.head(ctx_, model_.forward(ctx_, step, cache_));
}

// Draws a token at each row, keeps what agrees with the draft, publishes it.
void Engine::accept(int num_seqs, bool masked) {
  const StepInputs::Device& inputs = decode_inputs_.device();
  const TokenTrees trees = trees_of(num_seqs);
  const Tensor logits = model_.logits(num_seqs * shape_.tree_size);
  if (!drafter_) {
    sampler_.draw(ctx_, logits, inputs.seq_slots, inputs.positions, nullptr, masked);
    return finish(inputs, num_seqs, num_seqs);
  }
  sampler_.draw(ctx_, logits, trees.row_slots, trees.row_positions, &trees, masked);
  accept_tree(ctx_, accept_params(trees));
  keep_accepted(ctx_, keep_params(trees));
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

// ---- decoding in two halves, with masks of tokens

std::vector<Engine::DraftedTree> Engine::begin_masked(const std::vector<int>& slots,
                                                      std::optional<DraftShape> shape) {
  GraphRunner::Key key = begin_decode_step(slots, shape.value_or(max_shape()));
  key.part = GraphRunner::Part::kPropose;
  graphs_->run(key, [&] { propose(key.num_seqs, key.max_kv); });
  if (drafter_) publish_trees(key.num_seqs);
  key.part = GraphRunner::Part::kVerify;
  graphs_->run(key, [&] { verify(key.num_seqs, key.max_kv); });
  half_done_ = slots;
  return read_trees(key.num_seqs);
}

void Engine::end_masked(const TokenMasks& masks) {
  CHECK_STATE(!half_done_.empty(), "no masked step has begun");
  set_device(ctx_.device);
  const std::vector<int> slots = std::exchange(half_done_, {});
  const int num_seqs = static_cast<int>(slots.size());
  upload_masks(masks, num_seqs * shape_.tree_size);
  graphs_->run({.num_seqs = num_seqs, .shape = shape_, .part = GraphRunner::Part::kAccept},
               [&] { accept(num_seqs, /*masked=*/true); });
  end_decode_step(slots);
}

// ---- prompts

void Engine::prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks,
                     const WriteLogits& write) {
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
  const int num_sampled = static_cast<int>(sampled_slots.size());
  const bool masked = !masks.rows.empty();
  if (masked) upload_masks(masks, num_sampled);
  prefill_inputs_.upload_prefill(ctx_, num_steps_, items, host_lengths_);
  run_prefill(items, num_rows, num_sampled, masked, write);
  for (const PrefillItem& item : items)
    host_lengths_[item.slot] += static_cast<int>(item.ids.size());
  end_step(sampled_slots);
}

void Engine::run_prefill(const std::vector<PrefillItem>& items, int num_rows, int num_sampled,
                         bool masked, const WriteLogits& write) {
  const StepInputs::Device& inputs = prefill_inputs_.device();
  const Tensor hidden = model_.forward(ctx_, prefill_step(items, num_rows), cache_);
  if (write) read_logits(hidden, write);
  if (num_sampled > 0) {
    const Tensor rows = last_rows_.rows(0, num_sampled);
    gather_rows(ctx_, {.out = rows, .x = hidden, .index = inputs.sampled_rows});
    const Tensor logits = model_.head(ctx_, rows);
    sampler_.draw(ctx_, logits, inputs.sampled_slots, inputs.sampled_positions, nullptr, masked);
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

void Engine::prompt_logits(const std::vector<int>& ids, const WriteLogits& write) {
  check_ready();
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
  half_done_.clear();
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
