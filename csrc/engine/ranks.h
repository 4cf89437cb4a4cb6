// The engine of Python: one Engine for each rank. Each has a part of the model. Usually there is
// one rank.
//
// Every call that changes something runs on all ranks at once, with the same arguments. Rank 0 runs
// on the calling thread, the others on threads of their own. The ranks hold the same tokens,
// lengths and page tables, and draw the same tokens from the same logits. They exchange data on the
// device alone, in the sums of a layer and the logits (kernels/ranks).
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace cpmcu {

class Ranks;

// The pages of all ranks: Python's Pages.
struct RankPages {
  Ranks& ranks;
};

class Ranks {
 public:
  // Plans and allocates the memory of all ranks. Throws if the model cannot be divided, if it does
  // not fit, or if the GPUs are unequal or cannot reach each other's memory.
  Ranks(const ModelSpec& spec, const RuntimeConfig& config,
        const std::optional<DrafterSpec>& draft = std::nullopt);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  // The `max_model_len` that an engine with these arguments would have with the memory that is free
  // now. Allocates no memory. Throws as the constructor does.
  static int planned_model_len(const ModelSpec& spec, const RuntimeConfig& config,
                               const std::optional<DrafterSpec>& draft = std::nullopt);

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& first() const { return *engines_.front(); }
  Engine& rank(int rank) const { return *engines_.at(static_cast<size_t>(rank)); }
  RankPages& pages() { return pages_; }

  // Calls run(engine, rank) for all ranks at once and waits for all. If all ranks throw, throws the
  // error of rank 0, and the engine goes on. If only some ranks throw, their states differ. Then
  // this call and every later call throw. On GPUs, first waits until no other engine of several
  // ranks has a call running or a step in flight.
  void each(const std::function<void(Engine&, int)>& run);

  // ---- calls whose arguments or results differ between the ranks
  void load_file(const std::string& path, const std::vector<FileEntry>& entries,
                 const std::function<void(int64_t)>& progress);
  void prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks = {},
               const Engine::WriteLogits& write = nullptr, bool skip_draft = false);
  std::vector<Engine::DraftedTree> begin_masked(const std::vector<int>& slots,
                                                std::optional<DraftShape> shape);
  std::vector<Engine::SlotOutput> collect();
  // For tests: from now on a rank sends nothing to the others.
  void silence(int rank);

 private:
  struct Plans {};
  Ranks(const ModelSpec& spec, const RuntimeConfig& config, const std::optional<DrafterSpec>& draft,
        Plans);
  void connect();
  // As `each`. `before`: another engine, whose steps must end first; null: none.
  void run_all(const std::function<void(Engine&, int)>& run, const Ranks* before);
  void work(int rank);
  void call(int rank);
  static int distance_of(const std::exception_ptr& error);
  void throw_errors();

  std::vector<std::unique_ptr<Engine>> engines_;
  RankPages pages_{*this};
  volatile int* failed_ = nullptr;  // the flag Exchange::failed
  bool broken_ = false;             // the states of the ranks differ, so every call throws

  // The call that the threads make. `num_calls_` counts calls; `num_running_`: threads that are not
  // done with the last one.
  const std::function<void(Engine&, int)>* run_ = nullptr;
  const Ranks* before_ = nullptr;  // the argument of run_all
  std::atomic<uint64_t> num_calls_{0};
  std::atomic<int> num_running_{0};
  std::atomic<bool> ends_{false};
  std::vector<std::exception_ptr> errors_;  // the exception that each rank threw, or null
  std::vector<std::jthread> threads_;       // the threads of ranks 1, 2, …
};

}  // namespace cpmcu
