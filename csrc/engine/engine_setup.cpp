// Construction of an engine: plans and allocates memory, divides it into buffers, loads weights.
#include <algorithm>

#include "engine/engine.h"
#include "kernels/gemm/fused_layer.h"
#include "kernels/gemm/gemm.h"
#include "kernels/ranks/rank_sum.h"
#include "model/model_part.h"
#include "state/page_shares.h"

namespace cpmcu {
namespace {

// Limit of a sequence's tokens, so that sums with other counts fit an int.
constexpr int kMaxTokens = 1 << 30;
constexpr double kMaxGigabytes = 1e6;

// Returns one rank's part of `spec`. Both specs are checked before anything is built from them.
ModelSpec checked_part(const ModelSpec& spec, const RuntimeConfig& config) {
  spec.check_validity(config.device == "cuda" || config.plans_for.value_or(0) > 0);
  return part_of(spec, config.num_ranks);
}

std::string mib(int64_t bytes) { return format_text("{} MiB", (bytes + (1 << 20) - 1) >> 20); }

void check_limits(const RuntimeConfig& config) {
  CHECK(config.memory_limit > 0 && config.memory_limit <= kMaxGigabytes,
        "memory_limit is {}, expected a share above 0 and at most 1, or GB above 1",
        config.memory_limit);
  CHECK(!config.plans_for || (config.device == "cpu" && config.memory_limit > 1),
        "memory_limit is {} on {}, expected GB above 1 on cpu for a plan of another device",
        config.memory_limit, config.device);
  CHECK(config.chunk_length >= 1, "chunk_length is {}, expected at least 1", config.chunk_length);
  CHECK(config.max_num_seqs >= 1 && config.max_num_seqs <= kMaxSeqs,
        "max_num_seqs is {}, expected 1 to {}", config.max_num_seqs, kMaxSeqs);
  CHECK(config.max_model_len >= 0 && config.max_model_len <= kMaxTokens,
        "max_model_len is {}, expected 1 to {}, or 0 for the model's", config.max_model_len,
        kMaxTokens);
}

// Bytes that one rank may use. `text`: receives the limit in words.
int64_t budget_of(const RuntimeConfig& config, Device device, std::string& text) {
  const double limit = config.memory_limit;
  const auto limit_bytes = static_cast<int64_t>(limit * 1e9);
  if (config.plans_for) {
    text = format_text("{} GB", limit);
    return limit_bytes;
  }
  int64_t free_bytes = device_info(device).free_bytes;
  if (!device.is_cuda()) free_bytes /= config.num_ranks;  // ranks share the host's memory
  if (limit <= 1) {
    text = format_text("{} of the {} that are free", limit, mib(free_bytes));
    return static_cast<int64_t>(limit * static_cast<double>(free_bytes));
  }
  if (limit_bytes > free_bytes) {
    throw Error(ErrorKind::kMemory,
                format_text("memory_limit is {} GB, but {} are free: lower it, or "
                            "free memory",
                            limit, mib(free_bytes)));
  }
  text = format_text("{} GB", limit);
  return limit_bytes;
}

}  // namespace

Engine::Engine(const ModelSpec& spec, const RuntimeConfig& config,
               const std::optional<DrafterSpec>& draft, int rank)
    : rank_(rank),
      spec_(checked_part(spec, config)),
      config_(config),
      ctx_(device_named(config.device, config.device_index + rank)),
      state_(states_.add_model("")),
      model_(spec_),
      step_({spec_, model_, sampler_}, draft ? &*draft : nullptr),
      pages_(ctx_, states_, ring_, num_steps_, rank, config.num_ranks) {
  if (config.num_ranks > 1) {
    whole_ = spec;
    exchange_.rank = rank, exchange_.num_ranks = config.num_ranks;
    ctx_.exchange = &exchange_;
  }
  if (config.plans_for) {
    ctx_.compute_capability = *config.plans_for;
  } else if (!has_prompt_gemm(ctx_.compute_capability)) {
    cublas_ = CublasLt::load(ctx_, config.cublas_paths);
  }
  ctx_.cublas = cublas_.get();
  plan_memory();
}

void Engine::allocate() {
  arena_ =
      config_.plans_for ? Arena::of_addresses(plan_) : std::make_unique<Arena>(ctx_.device, plan_);
  bind();
}

void Engine::silence() {
  CHECK(ctx_.exchange != nullptr, "one rank has nobody to send to, expected several");
  const uint32_t silent = 1;
  set_device(ctx_.device);
  copy_to_device(ctx_.device, exchange_.state + kSilent, &silent, sizeof(silent), ctx_.stream);
  synchronize(ctx_.device, ctx_.stream);
}

void Engine::synchronize_device() {
  set_device(ctx_.device);
  synchronize(ctx_.device, ctx_.stream);
}

Engine::~Engine() {
  try {
    synchronize_device();   // no step may read memory that is released below
  } catch (const Error&) {  // a broken device: free what can be freed
  }
  graphs_.reset();
  loader_.reset();
}

// The limits of the config size all buffers except the pages. Pages take the rest of the memory
// limit.
void Engine::plan_memory() {
  check_limits(config_);
  const int by_default = config_.sized_for > 0
                             ? std::min(config_.sized_for, spec_.max_position_embeddings)
                             : spec_.max_position_embeddings;
  const int max_tokens = config_.max_model_len > 0 ? config_.max_model_len : by_default;
  const int lookahead = step_.lookahead();
  if (ctx_.compute_capability > 0 && config_.cuda_graph && config_.max_num_seqs > 1) {
    idle_slot_ = config_.max_num_seqs;
    num_idle_pages_ = pages_for(2 + lookahead);
  }
  plan_buffers(max_tokens);

  std::string limit;
  const int64_t budget = budget_of(config_, ctx_.device, limit);
  const int64_t loading = plan_.assign(), fixed = plan_.bytes_before(kLoad);
  const std::vector<PageDemand> demands = page_demands();
  const int64_t least = least_bytes(demands);
  const int64_t need = std::max(fixed + least, loading);
  if (budget < need) {
    throw Error(
        ErrorKind::kMemory,
        format_text("the model does not fit: {} of weights, {} of state and scratch and {} of "
                    "KV cache for {} tokens make {}, but the limit is {} ({}): {} too much",
                    mib(plan_.group_bytes("weights")),
                    mib(need - least - plan_.group_bytes("weights")), mib(least),
                    demands[0].least * kPageSize, mib(need), mib(budget), limit,
                    mib(need - budget)));
  }
  most_pages_ = divide_pages(demands, budget - fixed);
  max_tokens_ = max_tokens;
}

void Engine::plan_pages(const std::vector<int64_t>& num_pages) {
  const int64_t held = (num_pages[0] - num_idle_pages_) * kPageSize - step_.lookahead();
  max_tokens_ = static_cast<int>(std::min<int64_t>(max_tokens_, held));
  CHECK(max_tokens_ >= 1, "{} KV pages are too few for a draft tree", num_pages[0]);
  states_.plan_pages(plan_, num_pages);
  plan_.assign();
}

// Pages of each group of layers, those of the idle slot included.
std::vector<PageDemand> Engine::page_demands() const {
  const int lookahead = step_.lookahead(), seqs = config_.max_num_seqs;
  const int64_t sequence = pages_for(limits_.max_kv), idle = num_idle_pages_;
  const int64_t all = sequence * seqs + idle;
  std::vector<PageDemand> demands;
  for (int i = 0; i < states_.num_groups(); ++i) {
    const PageGroup& group = states_.group(i);
    // A model without paged state still counts its tokens in pages.
    PageDemand demand{.page_bytes = std::max<int64_t>(i == 0, states_.page_bytes(i)),
                      .least = (config_.max_model_len > 0 ? sequence : 1 + pages_for(lookahead)),
                      .sequence = sequence,
                      .running = all,
                      .most = all};
    if (group.window() > 0) {
      // The last entries of a sequence, which it holds in addition to the window: those of steps in
      // flight, and of a page that is not published yet.
      const int recent =
          launch_ahead() * tokens_per_step() + lookahead + std::max(num_rewritten(), 1) + kPageSize;
      const int64_t window = std::min<int64_t>(sequence, group.most_pages(recent));
      // Pages of the tokens that one prefill step can add.
      const int64_t chunk = pages_for(limits_.max_tokens);
      demand.sequence = demand.least = std::min(sequence, window + chunk);
      demand.running = std::min(all, window * seqs + chunk + idle);
    }
    demand.least += idle;
    demand.sequence += idle;
    demands.push_back(demand);
  }
  return demands;
}

void Engine::plan_buffers(int max_tokens) {
  const int seqs = config_.max_num_seqs, slots = seqs + (idle_slot_ < 0 ? 0 : 1);
  const int decode_tokens = seqs * step_.largest().tree_size;
  limits_ = {.max_tokens = std::max(std::min(config_.chunk_length, max_tokens), decode_tokens),
             .max_decode_tokens = decode_tokens,
             .max_tree_size = step_.largest().tree_size,
             .max_kv = max_tokens + step_.lookahead(),
             .compute_capability = ctx_.compute_capability};
  model_.keep_aux_hidden(step_.needs().layers);
  model_.plan(plan_, state_, limits_, std::max(kMaxSkinnyRows, decode_tokens),
              std::max(kMaxSkinnyRows, std::min(kMaxLogitRows, decode_tokens)));
  sampler_.plan(plan_, slots, decode_tokens, spec_.vocab_size, max_tokens,
                verification_named(config_.verify_strategy, config_.verify_window));
  step_.plan(plan_, state_, states_,
             {.max_seqs = seqs,
              .max_slots = slots,
              .max_prompt_tokens = limits_.max_tokens,
              .max_tokens = max_tokens,
              .max_kv = limits_.max_kv,
              .compute_capability = ctx_.compute_capability});
  states_.plan_slots(plan_, slots, limits_.max_kv);
  Carver counter;
  PrefillInputs::layout(counter, limits_.max_tokens, seqs, step_.max_path());
  prefill_block_.plan(plan_, "prefill_inputs", counter.num_bytes());
  decode_block_.plan(plan_, "decode_inputs", int64_t{4} * seqs);
  ring_.plan(plan_);
  const int64_t hidden_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);
  if (ctx_.exchange != nullptr) plan_exchange();
  last_rows_id_ = plan_.add_scratch("last_rows", seqs * hidden_bytes, kMlp + 3, kHead);
}

void Engine::plan_exchange() {
  const int64_t row_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);
  exchange_.width = row_bytes / 4;
  exchange_.num_words =
      std::max(limits_.max_tokens * exchange_.width, int64_t{spec_.vocab_size} / spec_.num_ranks);
  exchange_.fused_words = rank_sum_words(kMaxFusedRows, spec_.hidden_size);
  receive_id_ = plan_.add("exchange.buffers", "state", 8 * exchange_.buffer_words());
  rounds_id_ =
      plan_.add("exchange.rounds", "state", int64_t{4} * (kExchangeCtas + 1 + kNumExchangeStates));
}

void Engine::bind_exchange() {
  exchange_.buffers[rank_] = arena_->array<uint64_t>(receive_id_);
  exchange_.rounds = arena_->array<uint32_t>(rounds_id_);
  exchange_.state = exchange_.rounds + kExchangeCtas + 1;
  fill_bytes(ctx_.device, exchange_.buffers[rank_], 0, 8 * exchange_.buffer_words(), ctx_.stream);
  fill_bytes(ctx_.device, exchange_.rounds, 0, 4 * (kExchangeCtas + 1 + kNumExchangeStates),
             ctx_.stream);
}

void Engine::bind() {
  const int seqs = config_.max_num_seqs;
  states_.bind(ctx_, *arena_);
  model_.bind(*arena_, state_);
  model_.list_tensors(weights_);
  if (whole_) {
    weights_.take_parts(tensors_of(*whole_), tensors_of(without_other_heads(spec_)), rank_,
                        config_.num_ranks);
  }
  sampler_.bind(*arena_);
  step_.bind(*arena_);
  step_.list_tensors(weights_);
  if (whole_) {
    const WeightTable of_draft = step_.divided_tensors();
    if (!of_draft.entries().empty()) {
      const WeightTable part = weights_;
      weights_.take_parts(of_draft, part, rank_, config_.num_ranks);
    }
  }
  slots_.resize(static_cast<size_t>(seqs));
  graphs_.emplace(ctx_, config_.cuda_graph);
  if (config_.plans_for) return;  // what follows writes to the arena
  if (whole_) bind_exchange();
  states_.clear_slots(ctx_);
  sampler_.clear(ctx_);
  step_.clear(ctx_);
  prefill_block_.bind(ctx_, *arena_, kMaxInFlight);
  decode_block_.bind(ctx_, *arena_, kMaxInFlight);
  Carver device(prefill_block_.device());
  prefill_inputs_ = PrefillInputs::layout(device, limits_.max_tokens, seqs, step_.max_path());
  ring_.bind(ctx_, *arena_, kMaxInFlight, seqs);
  last_rows_ = arena_->tensor(last_rows_id_, spec_.dtype, {seqs, spec_.hidden_size});
  if (idle_slot_ >= 0) {
    sampler_.reset(ctx_, step_.slots(), idle_slot_, {}, {}, 0);
    const int length = 1;  // at least 1: a shifted draft's cache has one token less
    copy_to_device(ctx_.device, step_.slots().lengths + idle_slot_, &length, sizeof(int),
                   ctx_.stream);
    step_.reset(ctx_, idle_slot_, {.finished = 1});
    const int entries = 2 + step_.lookahead();
    CHECK_STATE(
        pages_.reserve(idle_slot_, entries) && pages_.reserve_windows(idle_slot_, 1, entries),
        "no page is free");
  }
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
  step_.finish_loading(ctx_);
  states_.clear_pages(ctx_);
  ready_ = true;
}

std::vector<LaunchRow> Engine::launches(Phase phase, std::optional<int> capability) const {
  return model_.launches(phase,
                         capability ? CutTarget::of_capability(*capability) : CutTarget::of(ctx_));
}

void Engine::cut_for(int capability) { model_.cut(CutTarget::of_capability(capability)); }

std::map<std::string, int64_t> Engine::counters() const {
  const DeviceCounters device = device_counters();
  return {{"steps", static_cast<int64_t>(num_steps_)},   {"allocations", device.allocations},
          {"synchronizations", device.synchronizations}, {"waits", num_waits_},
          {"graph_captures", graphs_->num_captures()},   {"graph_replays", graphs_->num_replays()}};
}

}  // namespace cpmcu
