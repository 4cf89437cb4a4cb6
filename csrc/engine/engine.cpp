// The page to read first: what a step is.
#include "engine/engine.h"

#include <algorithm>

#include "kernels/gather_rows.h"
#include "kernels/gemm/gemm.h"

namespace cpmcu {
namespace {

constexpr int kMaxInFlight = 8;

Context make_context(const RuntimeConfig& config) {
  CHECK(config.device == "cpu" || config.device == "cuda", "device is \"{}\", expected cpu or cuda",
        config.device);
  Context ctx;
  ctx.device = {config.device == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu,
                config.device_index};
  if (!ctx.device.is_cuda()) return ctx;
  const DeviceInfo info = device_info(ctx.device);
  ctx.sm_count = info.sm_count;
  ctx.compute_capability =
      std::stoi(info.compute_capability) * 10 + (info.compute_capability.back() - '0');
  set_device(ctx.device);
  ctx.stream = create_stream(ctx.device);
  return ctx;
}

std::string mib(int64_t bytes) { return format("{} MiB", (bytes + (1 << 20) - 1) >> 20); }

}  // namespace

// ---- steps

void Engine::prefill(const std::vector<PrefillItem>& items) {
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
  run_prefill(items, num_rows, static_cast<int>(sampled_slots.size()));
  for (const PrefillItem& item : items)
    host_lengths_[item.slot] += static_cast<int>(item.ids.size());
  end_step(sampled_slots);
}

void Engine::run_prefill(const std::vector<PrefillItem>& items, int num_rows, int num_sampled) {
  const StepInputs::Device& inputs = prefill_inputs_.device();
  const Tensor hidden = model_.forward(ctx_, prefill_step(items, num_rows), cache_);
  if (num_sampled > 0) {
    const Tensor rows = last_rows_.rows(0, num_sampled);
    gather_rows(ctx_, {.out = rows, .x = hidden, .index = inputs.sampled_rows});
    const Tensor logits = model_.head(ctx_, rows);
    sampler_.draw(ctx_, logits, inputs.sampled_slots, inputs.sampled_positions);
  }
  finish(inputs, static_cast<int>(items.size()), num_sampled);
}

void Engine::decode(const std::vector<int>& slots) {
  int max_kv = 0;
  CHECK(!slots.empty() && static_cast<int>(slots.size()) <= config_.max_num_seqs,
        "a decode step of {} sequences, expected 1 to {}", slots.size(), config_.max_num_seqs);
  for (int slot : slots) {
    check_slot(slot);
    check_room(slot, 1);
    CHECK(host_lengths_[slot] > 0, "slot {} decodes before its prompt was prefilled", slot);
    max_kv = std::max(max_kv, host_lengths_[slot] + 1);
  }
  begin_step();
  if (slots != decode_slots_) {
    decode_inputs_.upload_slots(ctx_, num_steps_, slots);
    decode_slots_ = slots;
  }
  const GraphRunner::Key key{.num_seqs = static_cast<int>(slots.size()),
                             .max_kv = kv_bucket(max_kv)};
  graphs_->run(key, [&] { run_decode(key.num_seqs, key.max_kv); });
  for (int slot : slots) ++host_lengths_[slot];
  end_step(slots);
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
    SlotOutput output{.slot = slot, .num_logprobs = slots_[slot].num_logprobs};
    output.tokens.assign(result.tokens, result.tokens + result.num_tokens);
    if (output.num_logprobs >= 0) {
      output.logprobs.assign(result.logprobs, result.logprobs + result.num_tokens);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

void Engine::prompt_logits(const std::vector<int>& ids,
                           const std::function<void(int, int, const float*)>& write) {
  check_ids(ids);
  const int slot = add_sequence({}, {}, 0);
  const auto run = [&] {
    const int total = static_cast<int>(ids.size());
    CHECK(total <= limits_.max_model_len, "the prompt has {} tokens, the engine holds {}", total,
          limits_.max_model_len);
    CHECK(reserve(slot, total), "the prompt has {} tokens, {} KV pages of {} are free", total,
          num_free_pages(), kPageSize);
    std::vector<float> host(size_t{kMaxSkinnyRows} * spec_.vocab_size);
    for (int begin = 0; begin < total; begin += limits_.max_rows) {
      const int count = std::min(limits_.max_rows, total - begin);
      const std::vector<PrefillItem> items{
          {.slot = slot, .ids = {ids.begin() + begin, ids.begin() + begin + count}}};
      prefill_inputs_.upload_prefill(ctx_, num_steps_, items, host_lengths_);
      const Tensor hidden = model_.forward(ctx_, prefill_step(items, count), cache_);
      for (int row = 0; row < count; row += kMaxSkinnyRows) {
        const int rows = std::min(kMaxSkinnyRows, count - row);
        const Tensor logits = model_.head(ctx_, hidden.rows(row, rows));
        copy_to_host(ctx_.device, host.data(), logits.data(), logits.num_bytes(), ctx_.stream);
        synchronize(ctx_.device, ctx_.stream);
        write(begin + row, rows, host.data());
      }
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

// ---- steps: helpers

void Engine::begin_step() {
  CHECK_STATE(ready_, "the engine has no weights yet: load them and call finish_loading");
  CHECK_STATE(in_flight() < kMaxInFlight, "{} steps are in flight; collect one first", in_flight());
  set_device(ctx_.device);
  if (!ctx_.device.is_cuda()) set_num_threads(config_.num_threads);
}

void Engine::end_step(const std::vector<int>& sampled_slots) {
  PendingStep step{.number = num_steps_++};
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
  CHECK(length + num_rows <= cache_.capacity(slot),
        "slot {} has pages for {} tokens and needs {}; reserve them first", slot,
        cache_.capacity(slot), length + num_rows);
}

SlotState Engine::slot_state() const {
  return {.lengths = lengths_,
          .next_tokens = next_tokens_,
          .counts = sampler_.counts(),
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
  host_lengths_[slot] = 0;
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
  return cache_.reserve(ctx_, slot, num_tokens);
}

// ---- load

Engine::Engine(const ModelSpec& spec, const RuntimeConfig& config)
    : spec_(spec),
      config_(config),
      ctx_(make_context(config)),
      model_(spec_),
      cache_({.num_layers = spec.num_hidden_layers,
              .num_kv_heads = spec.num_key_value_heads,
              .head_dim = spec.head_dim,
              .dtype = spec.dtype}) {
  try {
    cublas_ = CublasLt::load(ctx_, config.cublas_paths);
    ctx_.cublas = cublas_.get();
    plan_memory();
    arena_ = std::make_unique<Arena>(ctx_.device, plan_);
    bind();
  } catch (...) {
    destroy_stream(ctx_.device, ctx_.stream);
    throw;
  }
}

Engine::~Engine() {
  try {
    set_device(ctx_.device);
    synchronize(ctx_.device, ctx_.stream);  // nothing may run on memory that goes away
  } catch (const Error&) {                  // a broken device: free what can be freed
  }
  graphs_.reset();
  loader_.reset();
  destroy_stream(ctx_.device, ctx_.stream);
}

// Everything but the KV pages is sized by the limits; pages take what the memory limit leaves.
void Engine::plan_memory() {
  spec_.check_validity(ctx_.device.is_cuda());
  CHECK(config_.memory_limit > 0 && config_.memory_limit <= 1,
        "memory_limit is {}, expected above 0 and at most 1", config_.memory_limit);
  CHECK(config_.chunk_length >= 1, "chunk_length is {}, expected at least 1", config_.chunk_length);
  CHECK(config_.max_num_seqs >= 1 && config_.max_num_seqs <= kMaxSkinnyRows,
        "max_num_seqs is {}, expected 1 to {}", config_.max_num_seqs, kMaxSkinnyRows);
  CHECK(config_.max_model_len >= 0,
        "max_model_len is {}, expected at least 1, or 0 for the model's", config_.max_model_len);
  const int max_len =
      config_.max_model_len > 0 ? config_.max_model_len : spec_.max_position_embeddings;
  const int slots = config_.max_num_seqs;
  limits_ = {.max_rows = std::max(std::min(config_.chunk_length, max_len), slots),
             .max_decode_rows = slots,
             .max_model_len = max_len};
  const int64_t hidden_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);

  model_.plan(plan_, limits_, kMaxSkinnyRows);
  cache_.plan_table(plan_, slots, max_len);
  sampler_.plan(plan_, slots, slots, spec_.vocab_size, max_len);
  prefill_inputs_.plan(plan_, "prefill_inputs", limits_.max_rows, slots);
  decode_inputs_.plan(plan_, "decode_inputs", slots, slots);
  ring_.plan(plan_);
  lengths_id_ = plan_.add("slot_lengths", "state", int64_t{4} * slots);
  next_tokens_id_ = plan_.add("next_tokens", "state", int64_t{4} * slots);
  last_rows_id_ = plan_.add_scratch("last_rows", slots * hidden_bytes, kMlp + 3, kHead);

  const KvCache::Shape shape{spec_.num_hidden_layers, spec_.num_key_value_heads, spec_.head_dim,
                             spec_.dtype};
  const int64_t free_bytes = device_info(ctx_.device).free_bytes;
  const int64_t budget =
      static_cast<int64_t>(config_.memory_limit * static_cast<double>(free_bytes));
  const int64_t fixed = plan_.assign();
  const int64_t pages_of_one = (max_len + kPageSize - 1) / kPageSize;
  const int64_t wanted_pages = config_.max_model_len > 0 ? pages_of_one : 1;
  const int64_t fitting = std::max<int64_t>(0, budget - fixed) / shape.page_bytes();
  if (fitting < wanted_pages) {
    const int64_t need = fixed + wanted_pages * shape.page_bytes();
    throw Error(
        ErrorKind::kMemory,
        format("the model does not fit: {} of weights, {} of state and scratch and {} of KV "
               "cache for {} tokens make {}, but the limit is {} ({} of the {} that are "
               "free): {} too much. Lower max_model_len, chunk_length or max_num_seqs, raise "
               "memory_limit, or free memory",
               mib(plan_.group_bytes("weights")), mib(fixed - plan_.group_bytes("weights")),
               mib(wanted_pages * shape.page_bytes()), wanted_pages * kPageSize, mib(need),
               mib(budget), config_.memory_limit, mib(free_bytes), mib(need - budget)));
  }
  const int64_t num_pages = std::min(fitting, pages_of_one * slots);
  limits_.max_model_len = static_cast<int>(std::min<int64_t>(max_len, num_pages * kPageSize));
  cache_.plan_pages(plan_, static_cast<int>(num_pages));
  plan_.assign();
}

void Engine::bind() {
  const int slots = config_.max_num_seqs;
  model_.bind(*arena_);
  model_.list_tensors(weights_);
  cache_.bind(ctx_, *arena_);
  sampler_.bind(ctx_, *arena_);
  prefill_inputs_.bind(ctx_, *arena_, kMaxInFlight);
  decode_inputs_.bind(ctx_, *arena_, kMaxInFlight);
  ring_.bind(ctx_, *arena_, kMaxInFlight, slots);
  lengths_ = arena_->array<int>(lengths_id_);
  next_tokens_ = arena_->array<int>(next_tokens_id_);
  last_rows_ = arena_->tensor(last_rows_id_, spec_.dtype, {slots, spec_.hidden_size});
  slots_.resize(static_cast<size_t>(slots));
  host_lengths_.resize(static_cast<size_t>(slots));
  graphs_.emplace(ctx_, config_.cuda_graph);
  synchronize(ctx_.device, ctx_.stream);
}

void Engine::load_file(const std::string& path, const std::vector<FileEntry>& entries,
                       const std::function<void(int64_t)>& progress) {
  set_device(ctx_.device);
  if (!loader_) loader_ = std::make_unique<WeightLoader>(ctx_);
  loader_->load_file(weights_, path, entries, progress);
}

void Engine::load_array(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                        const void* data) {
  set_device(ctx_.device);
  if (!loader_) loader_ = std::make_unique<WeightLoader>(ctx_);
  loader_->load_array(weights_, name, dtype, shape, data);
}

void Engine::finish_loading() {
  weights_.check_complete();
  set_device(ctx_.device);
  loader_.reset();
  model_.finish_loading(ctx_);
  ready_ = true;
}

std::map<std::string, int64_t> Engine::counters() const {
  return {{"steps", static_cast<int64_t>(num_steps_)},
          {"waits", num_waits_},
          {"graph_captures", graphs_->num_captures()},
          {"graph_replays", graphs_->num_replays()}};
}

}  // namespace cpmcu
