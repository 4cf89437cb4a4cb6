#include "engine/ranks.h"

#include <algorithm>
#include <mutex>

namespace cpmcu {
namespace {

// Kernels of a rank wait for those of the others. If the steps of two engines overlap, each may
// fill a GPU that the other waits for. So the GPUs run steps of one engine at a time.
std::mutex turn;
// The engine whose steps may be in flight. Guarded by `turn`.
const Ranks* has_turn = nullptr;

Device device_of(const RuntimeConfig& config, int rank) {
  return device_named(config.device, config.device_index + rank);
}

// Throws if GPUs are missing or unequal, or cannot reach each other's memory. Equal GPUs compute
// the same bits.
void check_devices(const RuntimeConfig& config) {
  if (config.num_ranks == 1 || config.device != "cuda") return;
  CHECK(config.device_index + config.num_ranks <= device_count(),
        "tensor_parallel_size is {} from GPU {} on, but the machine has {} GPUs", config.num_ranks,
        config.device_index, device_count());
  const DeviceInfo first = device_info(device_of(config, 0));
  for (int rank = 1; rank < config.num_ranks; ++rank) {
    const DeviceInfo other = device_info(device_of(config, rank));
    CHECK(other.name == first.name && other.sm_count == first.sm_count,
          "tensor_parallel_size is {}, but GPU {} is a {} with {} SMs and GPU {} a {} with {}, "
          "expected equal GPUs",
          config.num_ranks, config.device_index, first.name, first.sm_count,
          config.device_index + rank, other.name, other.sm_count);
  }
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    for (int other = 0; other < config.num_ranks; ++other) {
      if (rank != other) enable_peer_access(device_of(config, rank), device_of(config, other));
    }
  }
}

}  // namespace

// Ranks have equal numbers of pages, those of the rank with the least memory.
Ranks::Ranks(const ModelSpec& spec, const RuntimeConfig& config,
             const std::optional<DrafterSpec>& draft, Plans) {
  check_devices(config);
  std::vector<int64_t> num_pages;
  for (int rank = 0; rank < std::max(config.num_ranks, 1); ++rank) {
    try {
      engines_.push_back(std::make_unique<Engine>(spec, config, draft, rank));
    } catch (const Error& error) {
      if (config.num_ranks == 1 || error.kind() != ErrorKind::kMemory) throw;
      throw Error(error.kind(),
                  format_text("GPU {} of {}: {}", rank, config.num_ranks, error.what()));
    }
    const std::vector<int64_t>& most = engines_.back()->most_pages();
    if (rank == 0) num_pages = most;
    for (size_t i = 0; i < most.size(); ++i) num_pages[i] = std::min(num_pages[i], most[i]);
  }
  for (const auto& engine : engines_) engine->plan_pages(num_pages);
}

Ranks::Ranks(const ModelSpec& spec, const RuntimeConfig& config,
             const std::optional<DrafterSpec>& draft)
    : Ranks(spec, config, draft, Plans()) {
  if (size() == 1) {
    first().allocate();
    return;
  }
  failed_ = static_cast<volatile int*>(allocate_pinned(first().device(), sizeof(int)));
  *failed_ = 0;
  for (const auto& engine : engines_) {
    engine->exchange()->failed = failed_;
    engine->allocate();
  }
  connect();
  errors_.resize(engines_.size());
  for (int rank = 1; rank < size(); ++rank) threads_.emplace_back([this, rank] { work(rank); });
}

Ranks::~Ranks() {
  ends_ = true;
  ++num_calls_;
  num_calls_.notify_all();
  threads_.clear();
  const Device device = engines_.empty() ? Device() : first().device();
  for (const auto& engine : engines_) {
    try {  // a GPU may still write into the memory of another
      engine->synchronize_device();
    } catch (const Error&) {
    }
  }
  if (size() > 1) {
    const std::lock_guard lock(turn);
    if (has_turn == this) has_turn = nullptr;
  }
  engines_.clear();
  if (failed_ != nullptr) release_pinned(device, const_cast<int*>(failed_));
}

int Ranks::planned_model_len(const ModelSpec& spec, const RuntimeConfig& config,
                             const std::optional<DrafterSpec>& draft) {
  return Ranks(spec, config, draft, Plans()).first().max_model_len();
}

void Ranks::connect() {
  for (const auto& engine : engines_) {
    for (int other = 0; other < size(); ++other) {
      engine->exchange()->buffers[other] = rank(other).exchange()->buffers[other];
    }
  }
}

// ---- calls

void Ranks::each(const std::function<void(Engine&, int)>& run) {
  if (size() == 1 || !first().device().is_cuda()) return run_all(run, nullptr);
  const std::lock_guard lock(turn);
  const Ranks* before = has_turn == this ? nullptr : has_turn;
  has_turn = this;
  run_all(run, before);
}

void Ranks::run_all(const std::function<void(Engine&, int)>& run, const Ranks* before) {
  if (size() == 1) return run(first(), 0);
  CHECK_STATE(!broken_, "a GPU failed before: load the model again");
  run_ = &run;
  before_ = before;
  num_running_ = size() - 1;
  ++num_calls_;
  num_calls_.notify_all();
  call(0);
  for (int running; (running = num_running_) != 0;) num_running_.wait(running);
  throw_errors();
}

void Ranks::work(int rank) {
  for (uint64_t calls = 0;;) {
    num_calls_.wait(calls);
    if (ends_) return;
    ++calls;
    call(rank);
    --num_running_;
    num_running_.notify_all();
  }
}

void Ranks::call(int rank) {
  std::exception_ptr& error = errors_[static_cast<size_t>(rank)];
  error = nullptr;
  try {
    if (before_ != nullptr && rank < before_->size()) {
      before_->rank(rank).synchronize_device();
      set_device(this->rank(rank).device());
    }
    (*run_)(this->rank(rank), rank);
  } catch (...) {
    error = std::current_exception();
    // On the CPU this ends the wait of other ranks before the deadline. On CUDA this must not
    // happen: if all ranks throw, the kernels of steps in flight must go on.
    if (!first().device().is_cuda() && *failed_ == 0) *failed_ = 1 + rank;
  }
}

// Distance of an error from its cause. 0: the rank's own error; 1: the rank got no answer; 2: an
// echo of another rank's failure.
int Ranks::distance_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RankFailure& failure) {
    return failure.is_echo() ? 2 : 1;
  } catch (...) {
    return 0;
  }
}

void Ranks::throw_errors() {
  std::exception_ptr nearest;
  int num_errors = 0, least = 3;
  for (std::exception_ptr& error : errors_) {
    if (error == nullptr) continue;
    ++num_errors;
    const int distance = distance_of(error);
    broken_ |= distance > 0;
    if (distance < least) least = distance, nearest = error;
    error = nullptr;
  }
  if (num_errors == 0) return;
  broken_ |= num_errors < size();
  if (!broken_) *failed_ = 0;
  std::rethrow_exception(nearest);
}

void Ranks::load_file(const std::string& path, const std::vector<FileEntry>& entries,
                      const std::function<void(int64_t)>& progress) {
  std::atomic<bool> stops{false};
  const auto load = [&](Engine& engine, int rank) {
    try {
      engine.load_file(path, entries, [&](int64_t bytes) {
        if (stops) throw RankFailure("another rank failed", /*is_echo=*/true);
        if (rank == 0) progress(bytes);
      });
    } catch (...) {
      stops = true;
      throw;
    }
  };
  run_all(load, nullptr);  // not in turn: `progress` may wait for a thread that waits for its turn
}

void Ranks::prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks,
                    const Engine::WriteLogits& write, bool skip_draft) {
  const Engine::WriteLogits ignore = [](int, int, const float*) {};
  each([&](Engine& engine, int rank) {
    engine.prefill(items, masks, write && rank > 0 ? ignore : write, skip_draft);
  });
}

std::vector<Engine::DraftedTree> Ranks::begin_masked(const std::vector<int>& slots,
                                                     std::optional<DraftShape> shape) {
  std::vector<Engine::DraftedTree> trees;
  each([&](Engine& engine, int rank) {
    std::vector<Engine::DraftedTree> own = engine.begin_masked(slots, shape);
    if (rank == 0) trees = std::move(own);
  });
  return trees;
}

std::vector<Engine::SlotOutput> Ranks::collect() {
  std::vector<std::vector<Engine::SlotOutput>> outputs(engines_.size());
  each([&](Engine& engine, int rank) { outputs[static_cast<size_t>(rank)] = engine.collect(); });
  for (const auto& other : outputs) {
    const bool agrees = std::ranges::equal(
        other, outputs[0], [](const auto& a, const auto& b) { return a.tokens == b.tokens; });
    broken_ |= !agrees;
    CHECK_STATE(agrees, "the GPUs drew different tokens from the same logits");
  }
  return std::move(outputs[0]);
}

void Ranks::silence(int rank) { this->rank(rank).silence(); }

}  // namespace cpmcu
