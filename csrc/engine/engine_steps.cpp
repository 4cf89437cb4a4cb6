// The beginning and the end of every step, and the checks before it.
#include <algorithm>
#include <array>

#include "engine/engine.h"

namespace cpmcu {
namespace {

// Numbers of sequences that a step is padded to. Few numbers make few graphs. Beyond 128, fused
// GEMMs read W once for each 128 rows.
constexpr std::array kSeqCounts{1,  2,  3,  4,  6,  8,   12,  16,  24,
                                32, 48, 64, 80, 96, 128, 160, 192, 256};
static_assert(kSeqCounts.back() == kMaxSeqs);

}  // namespace

void Engine::check_ready() const {
  CHECK_STATE(ready_, "the engine has no weights yet: load them and call finish_loading");
}

// Throws if a CUDA kernel has waited too long for another rank.
void Engine::check_exchange() const {
  if (ctx_.exchange == nullptr || *exchange_.failed == 0) return;
  throw RankFailure(
      format_text("GPU {} got no answer from another GPU within {} s: the step is lost; "
                  "load the model again",
                  config_.device_index + *exchange_.failed - 1, kWaitSeconds),
      /*is_echo=*/false);
}

void Engine::begin_step() {
  check_ready();
  CHECK_STATE(in_flight() < kMaxInFlight, "{} steps are in flight; collect one first", in_flight());
  set_device(ctx_.device);
  if (!ctx_.device.is_cuda()) set_num_threads(config_.num_threads);
  masked_batch_.reset();
}

void Engine::end_step(const std::vector<int>& sampled_slots, bool decodes) {
  StepInFlight step{.number = num_steps_++, .decodes = decodes};
  for (int slot : sampled_slots) {
    step.sampled.emplace_back(slot, slots_[static_cast<size_t>(slot)].generation);
  }
  in_flight_.push_back(std::move(step));
}

SpeculativeStep::Batch Engine::begin_decode(const std::vector<int>& slots,
                                            std::optional<DraftShape> shape) {
  const DraftShape wanted = shape.value_or(step_.largest());
  step_.check_shape(wanted);
  CHECK(!slots.empty() && static_cast<int>(slots.size()) <= config_.max_num_seqs,
        "a decode step of {} sequences, expected 1 to {}", slots.size(), config_.max_num_seqs);
  check_distinct(slots);
  int max_kv = 0;
  for (int slot : slots) {
    check_slot(slot);
    ensure_room(slot, 1);
    CHECK(slots_[static_cast<size_t>(slot)].has_root,
          "slot {} decodes before its prompt was prefilled", slot);
    max_kv = std::max(max_kv, length_bound(slot) + 1 + step_.lookahead());
  }
  begin_step();
  if (slots != decode_slots_) {
    std::vector<int> padded = slots;
    padded.resize(static_cast<size_t>(padded_seqs(static_cast<int>(slots.size()))), idle_slot_);
    std::copy(padded.begin(), padded.end(), static_cast<int*>(decode_block_.host(num_steps_)));
    decode_block_.upload(ctx_, num_steps_);
    decode_slots_ = slots;
  }
  return {.num_seqs = padded_seqs(static_cast<int>(slots.size())),
          .max_kv = kv_bucket(max_kv),
          .shape = wanted,
          .seq_slots = static_cast<int*>(decode_block_.device())};
}

void Engine::end_decode(const std::vector<int>& slots) {
  for (int slot : slots) slots_[static_cast<size_t>(slot)].in_flight_tokens += tokens_per_step();
  end_step(slots, /*decodes=*/true);
}

GraphRunner::Key Engine::key_of(const SpeculativeStep::Batch& batch, GraphRunner::Part part) const {
  return {.num_seqs = batch.num_seqs, .max_kv = batch.max_kv, .shape = batch.shape, .part = part};
}

int Engine::padded_seqs(int num_seqs) const {
  if (idle_slot_ < 0) return num_seqs;
  const auto* count = std::lower_bound(kSeqCounts.begin(), kSeqCounts.end(), num_seqs);
  return std::min(count == kSeqCounts.end() ? num_seqs : *count, config_.max_num_seqs);
}

// Waits for the steps in flight first: they may still upload masks from the same pinned memory.
void Engine::upload_masks(const TokenMasks& masks, int num_rows) {
  if (!in_flight_.empty()) ring_.wait(ctx_, in_flight_.back().number);
  sampler_.upload_masks(ctx_, masks, num_rows);
}

// An upper bound of the slot's length after the steps in flight.
int Engine::length_bound(int slot) const {
  const Slot& state = slots_[static_cast<size_t>(slot)];
  return std::min(state.length + state.in_flight_tokens, max_tokens_);
}

Step Engine::prefill_step(const std::vector<PrefillItem>& items) const {
  int num_rows = 0, max_seq_tokens = 0, max_kv = 0;
  for (const PrefillItem& item : items) {
    const int rows = static_cast<int>(item.ids.size());
    num_rows += rows;
    max_seq_tokens = std::max(max_seq_tokens, rows);
    max_kv = std::max(max_kv, slots_[static_cast<size_t>(item.slot)].length + rows);
  }
  const PrefillInputs& inputs = prefill_inputs_;
  return {.phase = Phase::kPrefill,
          .ids = inputs.ids,
          .tokens = {.num_tokens = num_rows,
                     .num_seqs = static_cast<int>(items.size()),
                     .max_seq_tokens = max_seq_tokens,
                     .max_kv = max_kv,
                     .positions = inputs.positions,
                     .token_seqs = inputs.token_seqs,
                     .seq_slots = inputs.seq_slots,
                     .seq_token_begin = inputs.seq_token_begin,
                     .slot_lengths = step_.slots().lengths,
                     .page_table = states_.page_table(),
                     .max_pages = states_.max_pages()},
          .accepted = step_.slots().accepted};
}

// A graph serves lengths up to a power of two of KV entries, at least 1024.
int Engine::kv_bucket(int num_tokens) const {
  int bucket = 1024;
  while (bucket < num_tokens) bucket *= 2;
  return std::min(bucket, states_.max_pages() * kPageSize);
}

void Engine::check_slot(int slot) const {
  CHECK(slot >= 0 && slot < config_.max_num_seqs && slots_[static_cast<size_t>(slot)].used,
        "slot {} holds no sequence", slot);
}

void Engine::check_distinct(std::vector<int> slots) const {
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  CHECK(twice == slots.end(), "slot {} is twice in one step", *twice);
}

void Engine::check_ids(const std::vector<int>& ids) const {
  CHECK(!ids.empty(), "a prompt chunk has no tokens");
  for (int id : ids) {
    CHECK(id >= 0 && id < spec_.vocab_size, "token id {} is outside the vocabulary of {}", id,
          spec_.vocab_size);
  }
}

void Engine::ensure_room(int slot, int num_tokens) {
  const int length = slots_[static_cast<size_t>(slot)].length;
  CHECK(length + num_tokens <= max_tokens_,
        "slot {} holds {} tokens and {} more were asked for; the engine holds {} a sequence", slot,
        length, num_tokens, max_tokens_);
  const int need = std::min(length_bound(slot) + num_tokens, max_tokens_);
  const int room = states_.capacity(slot) - step_.lookahead();
  CHECK(need <= room, "slot {} has pages for {} tokens and needs {}; reserve them first", slot,
        std::max(0, room), need);
  CHECK(reserve_windows(slot, need),
        "too few pages are free for the windows of slot {} at {} tokens; reserve them first", slot,
        need);
}

}  // namespace cpmcu
