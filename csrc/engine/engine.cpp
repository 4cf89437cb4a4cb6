// The interface of steps and sequences to the host. Read speculative/step.cpp first: it is the step
// itself.
#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "kernels/gemm/gemm.h"
#include "kernels/layer/gather_rows.h"

namespace cpmcu {

// ---- decoding. Each `run` records its launches as one CUDA graph

void Engine::decode(const std::vector<int>& slots, std::optional<DraftShape> shape) {
  const SpeculativeStep::Batch batch = begin_decode(slots, shape);
  graphs_->run(key_of(batch, GraphRunner::Part::kWhole), [&] {
    step_.propose(ctx_, batch);
    step_.verify(ctx_, batch, /*goes_on=*/true);
    step_.accept(ctx_, batch, /*masked=*/false, ring_.sink());
  });
  end_decode(slots);
}

std::vector<Engine::DraftedTree> Engine::begin_masked(const std::vector<int>& slots,
                                                      std::optional<DraftShape> shape) {
  const SpeculativeStep::Batch batch = begin_decode(slots, shape);
  graphs_->run(key_of(batch, GraphRunner::Part::kPropose), [&] { step_.propose(ctx_, batch); });
  step_.publish_trees(ctx_, batch);
  graphs_->run(key_of(batch, GraphRunner::Part::kVerify), [&] { step_.verify(ctx_, batch); });
  masked_batch_ = batch;
  masked_slots_ = slots;
  std::vector<DraftedTree> trees = step_.read_trees(batch);
  trees.resize(slots.size());
  return trees;
}

void Engine::end_masked(const TokenMasks& masks) {
  CHECK_STATE(masked_batch_.has_value(), "no masked step has begun");
  set_device(ctx_.device);
  const SpeculativeStep::Batch batch = *std::exchange(masked_batch_, std::nullopt);
  upload_masks(masks, static_cast<int>(masked_slots_.size()) * batch.shape.tree_size);
  graphs_->run(key_of(batch, GraphRunner::Part::kAccept),
               [&] { step_.accept(ctx_, batch, /*masked=*/true, ring_.sink()); });
  end_decode(masked_slots_);
}

std::vector<Engine::SlotOutput> Engine::collect() {
  CHECK_STATE(!in_flight_.empty(), "no step is in flight");
  const StepInFlight step = in_flight_.front();
  ring_.wait(ctx_, step.number);
  ++num_waits_;
  in_flight_.pop_front();
  pages_.steps_done(step.number + 1);
  check_exchange();
  std::vector<SlotOutput> outputs;
  for (size_t i = 0; i < step.sampled.size(); ++i) {
    const auto [index, generation] = step.sampled[i];
    Slot& slot = slots_[static_cast<size_t>(index)];
    if (slot.generation != generation) continue;  // the sequence was released meanwhile
    const SlotResult& result = ring_.entry(step.number)[i];
    if (step.decodes) {
      slot.length += result.num_tokens;
      slot.in_flight_tokens -= tokens_per_step();
    }
    SlotOutput output{.slot = index,
                      .num_logprobs = slot.num_logprobs,
                      .finished = step.decodes && result.finished != 0,
                      .inner = step.decodes ? result.inner : InnerCounts{}};
    output.tokens.assign(result.tokens, result.tokens + result.num_tokens);
    if (output.num_logprobs >= 0) {
      output.logprobs.assign(result.logprobs, result.logprobs + result.num_tokens);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

// ---- prompts

void Engine::prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks,
                     const WriteLogits& write, bool skip_draft) {
  int num_rows = 0;
  std::vector<int> slots, sampled_slots;
  CHECK(!items.empty() && static_cast<int>(items.size()) <= config_.max_num_seqs,
        "a prefill step of {} sequences, expected 1 to {}", items.size(), config_.max_num_seqs);
  for (const PrefillItem& item : items) {
    check_slot(item.slot);
    check_ids(item.ids);
    num_rows += static_cast<int>(item.ids.size());
    ensure_room(item.slot, static_cast<int>(item.ids.size()));
    CHECK(slots_[static_cast<size_t>(item.slot)].in_flight_tokens == 0,
          "slot {} has decode steps in flight; collect them before a prompt chunk", item.slot);
    slots.push_back(item.slot);
    if (item.last) sampled_slots.push_back(item.slot);
  }
  check_distinct(slots);
  CHECK(num_rows <= limits_.max_tokens, "a prefill step of {} tokens, the chunk length is {}",
        num_rows, limits_.max_tokens);
  begin_step();
  const int num_sampled = static_cast<int>(sampled_slots.size());
  const bool masked = !masks.rows.empty();
  if (masked) upload_masks(masks, num_sampled);
  std::vector<int> lengths;
  for (const Slot& slot : slots_) lengths.push_back(slot.length);
  Carver host(prefill_block_.host(num_steps_));
  PrefillInputs::layout(host, limits_.max_tokens, config_.max_num_seqs, step_.max_path())
      .fill(items, lengths, step_.max_path());
  prefill_block_.upload(ctx_, num_steps_);
  run_prefill(items, num_sampled, masked, write, skip_draft);
  for (const PrefillItem& item : items) {
    Slot& slot = slots_[static_cast<size_t>(item.slot)];
    slot.length += static_cast<int>(item.ids.size());
    slot.has_root = item.last;
  }
  end_step(sampled_slots, /*decodes=*/false);
}

void Engine::run_prefill(const std::vector<PrefillItem>& items, int num_sampled, bool masked,
                         const WriteLogits& write, bool skip_draft) {
  const PrefillInputs& inputs = prefill_inputs_;
  const Step step = prefill_step(items);
  const Tensor hidden = model_.forward(ctx_, step);
  if (write) read_logits(hidden, write);
  if (num_sampled > 0) {
    const Tensor rows = last_rows_.rows(0, num_sampled);
    gather_rows(ctx_, {.out = rows, .x = hidden, .index = inputs.sampled_rows});
    const Tensor logits = model_.head(ctx_, rows);
    sampler_.draw(ctx_, logits, inputs.sampled_slots, inputs.sampled_positions, nullptr, masked);
  }
  std::vector<int> num_before;
  for (const PrefillItem& item : items) {
    const Slot& slot = slots_[static_cast<size_t>(item.slot)];
    num_before.push_back(slot.length - slot.num_shared);
  }
  step_.draft_prompt(ctx_,
                     {.tokens = step.tokens,
                      .ids = step.ids,
                      .num_before = std::move(num_before),
                      .slots = step_.slots(),
                      .last_rows = inputs.last_rows,
                      .slot_rows = inputs.slot_rows},
                     skip_draft);
  finish_step(ctx_, {.seq_slots = inputs.seq_slots,
                     .seq_token_begin = inputs.seq_token_begin,
                     .num_seqs = step.tokens.num_seqs,
                     .num_tokens = step.tokens.num_tokens,
                     .ids = inputs.ids,
                     .token_seqs = inputs.token_seqs,
                     .sampled_seqs = inputs.sampled_seqs,
                     .num_sampled = num_sampled,
                     .tokens = sampler_.tokens(),
                     .logprobs = sampler_.logprobs(),
                     .sampling = sampler_.sampling(),
                     .state = step_.slots(),
                     .sink = ring_.sink()});
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
                         int num_prompt, const CachedPrefix& cached) {
  const auto it = std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.used; });
  CHECK_STATE(it != slots_.end(), "all {} sequence slots are taken", slots_.size());
  if (!ids.empty()) check_ids(ids);
  CHECK(cached.num_tokens % kPageSize == 0 && cached.num_tokens <= static_cast<int>(ids.size()) &&
            static_cast<int>(cached.pages.size()) <= states_.num_groups(),
        "{} tokens in pages of {} groups are cached of {} tokens, expected whole pages of {} "
        "tokens in {} groups",
        cached.num_tokens, cached.pages.size(), ids.size(), kPageSize, states_.num_groups());
  for (const HeldPages& pages : cached.pages) {
    CHECK(pages.first >= 0 && pages.end() * kPageSize <= cached.num_tokens,
          "pages {} to {} are shared of {} cached tokens, expected pages of {} of these tokens",
          pages.first, pages.end(), cached.num_tokens, kPageSize);
  }
  set_device(ctx_.device);
  const int slot = static_cast<int>(it - slots_.begin());
  sampler_.reset(ctx_, step_.slots(), slot, sampling, ids, num_prompt, cached.num_tokens);
  states_.reset(ctx_, slot);
  states_.share(ctx_, slot, cached.pages);
  // The last token of a sequence needs no KV entry (+ 1). Prefill emits the first token (- 1).
  const int room = max_tokens_ - static_cast<int>(ids.size()) + 1;
  SlotStop stop{.max_tokens = std::min(sampling.max_tokens, room) - 1};
  for (int id : sampling.stop_ids) {  // beyond kMaxStopIds only the host checks
    if (stop.num_stop_ids < kMaxStopIds) stop.stop_ids[stop.num_stop_ids++] = id;
  }
  step_.reset(ctx_, slot, stop, {ids.begin(), ids.begin() + cached.num_tokens});
  *it = {.used = true,
         .generation = it->generation + 1,
         .num_logprobs = sampling.logprobs,
         .num_shared = cached.num_tokens,
         .length = cached.num_tokens};
  return slot;
}

void Engine::release(int slot) {
  check_slot(slot);
  masked_batch_.reset();
  Slot& released = slots_[static_cast<size_t>(slot)];
  released.used = false;
  ++released.generation;
  pages_.release(slot);
}

void Engine::vacate(int slot) {
  check_slot(slot);
  CHECK_STATE(slots_[static_cast<size_t>(slot)].in_flight_tokens == 0,
              "slot {} has decode steps in flight; collect them before its pages go", slot);
  pages_.release(slot);
}

bool Engine::reserve(int slot, int num_tokens) {
  check_slot(slot);
  CHECK(num_tokens <= max_tokens_, "{} tokens were asked for, the engine holds {} a sequence",
        num_tokens, max_tokens_);
  return pages_.reserve(slot, num_tokens + step_.lookahead());
}

bool Engine::reserve_windows(int slot, int num_tokens) {
  check_slot(slot);
  return pages_.reserve_windows(slot, slots_[static_cast<size_t>(slot)].length,
                                std::min(num_tokens, max_tokens_) + step_.lookahead());
}

int Engine::reserve_step(const std::vector<int>& slots) {
  const int64_t most = std::min<int64_t>(max_tokens_, int64_t{num_pages()} * kPageSize);
  for (size_t i = 0; i < slots.size(); ++i) {
    check_slot(slots[i]);
    const int need =
        static_cast<int>(std::min<int64_t>(length_bound(slots[i]) + tokens_per_step(), most));
    const bool has_pages = states_.capacity(slots[i]) >= need + step_.lookahead();
    if ((!has_pages && !reserve(slots[i], need)) || !reserve_windows(slots[i], need)) {
      return static_cast<int>(i);
    }
  }
  return static_cast<int>(slots.size());
}

std::vector<int> Engine::num_missing(int slot, int num_tokens, int step_end) const {
  check_slot(slot);
  std::vector<int> missing;
  for (int i = 0; i < states_.num_groups(); ++i) {
    const int entries = std::min(i == 0 ? num_tokens : step_end, max_tokens_) + step_.lookahead();
    missing.push_back(
        states_.group(i).num_missing(slot, slots_[static_cast<size_t>(slot)].length, entries));
  }
  return missing;
}

}  // namespace cpmcu
