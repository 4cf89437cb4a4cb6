// How an engine comes to be: memory planned, allocated, carved; weights loaded.
#include <algorithm>

#include "engine/engine.h"
#include "kernels/gemm/gemm.h"

namespace cpmcu {
namespace {

constexpr int kMaxModelLen = 1 << 30;  // cells, so that what is added to them stays an int

std::unique_ptr<Drafter> make_drafter(const std::optional<DrafterSpec>& draft,
                                      const ModelSpec& target) {
  if (!draft) return nullptr;
  draft->check_validity(target);
  return DrafterRegistry::instance().create("drafter", draft->method, *draft, target);
}

std::vector<KvCache::Shape> cache_shapes(const ModelSpec& spec, const Drafter* drafter) {
  std::vector<KvCache::Shape> shapes{{.num_layers = spec.num_hidden_layers,
                                      .num_kv_heads = spec.num_key_value_heads,
                                      .head_dim = spec.head_dim,
                                      .dtype = spec.dtype}};
  if (drafter != nullptr && drafter->has_cache()) shapes.push_back(drafter->cache_shape());
  return shapes;
}

// Before anything is built from it.
const ModelSpec& checked(const ModelSpec& spec, const RuntimeConfig& config) {
  spec.check_validity(config.device == "cuda");
  return spec;
}

std::string mib(int64_t bytes) { return format("{} MiB", (bytes + (1 << 20) - 1) >> 20); }

}  // namespace

Engine::Engine(const ModelSpec& spec, const RuntimeConfig& config,
               const std::optional<DrafterSpec>& draft)
    : spec_(checked(spec, config)),
      config_(config),
      ctx_(device_named(config.device, config.device_index)),
      draft_(draft),
      drafter_(make_drafter(draft_, spec_)),
      model_(spec_),
      cache_(cache_shapes(spec_, drafter_.get())) {
  if (!has_prompt_gemm(ctx_.compute_capability)) {
    cublas_ = CublasLt::load(ctx_, config.cublas_paths);
  }
  ctx_.cublas = cublas_.get();
  plan_memory();
  arena_ = std::make_unique<Arena>(ctx_.device, plan_);
  bind();
}

Engine::~Engine() {
  try {
    set_device(ctx_.device);
    synchronize(ctx_.device, ctx_.stream);  // nothing may run on memory that goes away
  } catch (const Error&) {                  // a broken device: free what can be freed
  }
  graphs_.reset();
  loader_.reset();
  if (stops_mirror_ != nullptr) release_pinned(ctx_.device, stops_mirror_);
  if (trees_mirror_ != nullptr) release_pinned(ctx_.device, trees_mirror_);
}

// Everything but the KV pages is sized by the limits; pages take what the memory limit leaves.
void Engine::plan_memory() {
  CHECK(config_.memory_limit > 0 && config_.memory_limit <= 1,
        "memory_limit is {}, expected above 0 and at most 1", config_.memory_limit);
  CHECK(config_.chunk_length >= 1, "chunk_length is {}, expected at least 1", config_.chunk_length);
  CHECK(config_.max_num_seqs >= 1 && config_.max_num_seqs <= kMaxSkinnyRows,
        "max_num_seqs is {}, expected 1 to {}", config_.max_num_seqs, kMaxSkinnyRows);
  CHECK(config_.max_model_len >= 0 && config_.max_model_len <= kMaxModelLen,
        "max_model_len is {}, expected 1 to {}, or 0 for the model's", config_.max_model_len,
        kMaxModelLen);
  const int max_len =
      config_.max_model_len > 0 ? config_.max_model_len : spec_.max_position_embeddings;
  const int slots = config_.max_num_seqs;
  const int decode_rows = slots * max_shape().tree_size;
  limits_ = {.max_rows = std::max(std::min(config_.chunk_length, max_len), decode_rows),
             .max_decode_rows = decode_rows,
             .max_model_len = max_len + lookahead(),
             .compute_capability = ctx_.compute_capability};
  const int64_t hidden_bytes = int64_t{spec_.hidden_size} * size_of(spec_.dtype);

  if (drafter_ && drafter_->features() == FeatureKind::kLayers) model_.tap(draft_->feature_layers);
  model_.plan(plan_, limits_, std::max(kMaxSkinnyRows, decode_rows));
  cache_.plan_table(plan_, slots, limits_.max_model_len);
  sampler_.plan(plan_, slots, decode_rows, spec_.vocab_size, max_len);
  if (drafter_) plan_draft();
  prefill_inputs_.plan(plan_, "prefill_inputs", limits_.max_rows, slots);
  decode_inputs_.plan(plan_, "decode_inputs", slots, slots);
  ring_.plan(plan_);
  lengths_id_ = plan_.add("slot_lengths", "state", int64_t{4} * slots);
  next_tokens_id_ = plan_.add("next_tokens", "state", int64_t{4} * slots);
  last_rows_id_ = plan_.add_scratch("last_rows", slots * hidden_bytes, kMlp + 3, kHead);

  const int64_t page_bytes = cache_.page_bytes();
  const int64_t free_bytes = device_info(ctx_.device).free_bytes;
  const int64_t budget =
      static_cast<int64_t>(config_.memory_limit * static_cast<double>(free_bytes));
  const int64_t fixed = plan_.assign();
  const int64_t pages_of_one = (limits_.max_model_len + kPageSize - 1) / kPageSize;
  const int64_t wanted_pages =
      config_.max_model_len > 0 ? pages_of_one : 1 + (lookahead() + kPageSize - 1) / kPageSize;
  const int64_t fitting = std::max<int64_t>(0, budget - fixed) / page_bytes;
  if (fitting < wanted_pages) {
    const int64_t need = fixed + wanted_pages * page_bytes;
    throw Error(
        ErrorKind::kMemory,
        format("the model does not fit: {} of weights, {} of state and scratch and {} of KV "
               "cache for {} tokens make {}, but the limit is {} ({} of the {} that are "
               "free): {} too much. Lower max_model_len, chunk_length or max_num_seqs, raise "
               "memory_limit, or free memory",
               mib(plan_.group_bytes("weights")), mib(fixed - plan_.group_bytes("weights")),
               mib(wanted_pages * page_bytes), wanted_pages * kPageSize, mib(need), mib(budget),
               config_.memory_limit, mib(free_bytes), mib(need - budget)));
  }
  const int64_t num_pages = std::min(fitting, pages_of_one * slots);
  // From here on a limit of tokens; the pages also hold what a step needs beyond them.
  limits_.max_model_len =
      static_cast<int>(std::min<int64_t>(max_len, num_pages * kPageSize - lookahead()));
  CHECK(limits_.max_model_len >= 1, "{} KV pages are too few for a draft tree", num_pages);
  cache_.plan_pages(plan_, static_cast<int>(num_pages));
  plan_.assign();
}

// Columns of the features that the drafter sees of a row.
int64_t Engine::feature_width() const {
  const bool layers = drafter_->features() == FeatureKind::kLayers;
  const size_t count = layers ? draft_->feature_layers.size() : 1;
  return static_cast<int64_t>(count) * spec_.hidden_size;
}

// Buffers of speculation.
void Engine::plan_draft() {
  const int64_t slots = config_.max_num_seqs, nodes = draft_->tree_size,
                pending = tokens_per_step();
  drafter_->plan(plan_, {.max_seqs = config_.max_num_seqs,
                         .max_prompt_rows = limits_.max_rows,
                         .max_model_len = limits_.max_model_len,
                         .first_kv_layer = spec_.num_hidden_layers,
                         .compute_capability = limits_.compute_capability});
  num_spec_ints_ = slots * (7 * nodes + 2 * pending + 4) + 1 + limits_.max_rows;
  spec_ints_id_ = plan_.add("spec.ints", "state", 4 * num_spec_ints_);
  tree_masks_id_ = plan_.add("spec.masks", "state", 8 * slots * nodes);
  stops_id_ = plan_.add("spec.stops", "state", static_cast<int64_t>(sizeof(SlotStop)) * slots);
  history_id_ = plan_.add("spec.history", "state", 4 * slots * limits_.max_model_len);
  const int64_t row_bytes = feature_width() * size_of(spec_.dtype);
  features_id_ = plan_.add_scratch("features", limits_.max_rows * row_bytes, 0, kSample);
  pending_features_id_ = plan_.add("spec.pending_features", "state", slots * pending * row_bytes);
}

void Engine::bind_draft() {
  const int slots = config_.max_num_seqs, nodes = draft_->tree_size, pending = tokens_per_step();
  int* at = arena_->array<int>(spec_ints_id_);
  fill_bytes(ctx_.device, at, 0, 4 * num_spec_ints_, ctx_.stream);
  const auto take = [&](int count) {
    int* array = at;
    at += count;
    return array;
  };
  trees_ = {.num_seqs = slots,
            .num_nodes = nodes,
            .tokens = take(slots * nodes),
            .parents = take(slots * nodes),
            .depths = take(slots * nodes),
            .masks = arena_->array<uint64_t>(tree_masks_id_),
            .row_ids = take(slots * nodes),
            .row_positions = take(slots * nodes),
            .row_slots = take(slots * nodes),
            .row_seqs = take(slots * nodes),
            .seq_row_begin = take(slots + 1)};
  paths_ = take(slots * pending);
  num_emitted_ = take(slots);
  draft_state_ = {.draft_lengths = take(slots),
                  .pending_ids = take(slots * pending),
                  .pending_counts = take(slots)};
  zeros_ = take(limits_.max_rows);
  stops_ = arena_->array<SlotStop>(stops_id_);
  history_ = arena_->array<int>(history_id_);
  stops_mirror_ = static_cast<SlotStop*>(
      allocate_pinned(ctx_.device, static_cast<int64_t>(sizeof(SlotStop)) * slots));
  trees_mirror_ = static_cast<int*>(allocate_pinned(ctx_.device, int64_t{2} * 4 * slots * nodes));
  trees_ready_.emplace(ctx_.device);
  features_ = arena_->tensor(features_id_, spec_.dtype, {limits_.max_rows, feature_width()});
  draft_state_.pending_features = arena_->tensor(pending_features_id_, spec_.dtype,
                                                 {int64_t{slots} * pending, feature_width()});
  // A draft's rows beyond those that are pending are masked, but NaNs would stay in its cache.
  const Tensor& pending_features = draft_state_.pending_features;
  fill_bytes(ctx_.device, pending_features.data(), 0, pending_features.num_bytes(), ctx_.stream);
  drafter_->bind(*arena_);
  drafter_->list_tensors(weights_);
}

void Engine::bind() {
  const int slots = config_.max_num_seqs;
  model_.bind(*arena_);
  model_.list_tensors(weights_);
  if (drafter_) bind_draft();
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
  if (drafter_) {
    drafter_->finish_loading(
        ctx_, {.spec = &spec_,
               .embedding_table = model_.embedding_table(),
               .head_weight = model_.head_weight(),
               .project = [this](const Context& ctx, const Tensor& logits, const Tensor& hidden,
                                 float scale) { model_.project(ctx, logits, hidden, scale); }});
  }
  ready_ = true;
}

std::map<std::string, int64_t> Engine::counters() const {
  const DeviceCounters device = device_counters();
  return {{"steps", static_cast<int64_t>(num_steps_)},   {"allocations", device.allocations},
          {"synchronizations", device.synchronizations}, {"waits", num_waits_},
          {"graph_captures", graphs_->num_captures()},   {"graph_replays", graphs_->num_replays()}};
}

}  // namespace cpmcu
