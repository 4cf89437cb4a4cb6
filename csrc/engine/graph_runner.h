// Runs a step's launches as one CUDA graph, captured lazily and kept by key.
//
// The first run of a key is eager (nothing is captured for a shape that occurs once, and every
// kernel is loaded before a capture), the second captures, later ones replay. A graph stays valid
// while a sequence grows, because lengths, positions and ids are device data; the key holds only
// what changes launch shapes.
//
// Engines of a process that share a device take turns there, a run each: some kernels need the
// whole device (kernels/gemm/gemm_chain.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>

#include "core/context.h"
#include "speculative/drafter.h"

namespace cpmcu {

class GraphRunner {
 public:
  enum class Part { kWhole, kPropose, kVerify, kAccept };  // of a decode step
  struct Key {
    int num_seqs = 0;
    int max_kv = 0;  // bucket
    DraftShape shape{};
    Part part = Part::kWhole;
    auto operator<=>(const Key&) const = default;
  };

  GraphRunner(const Context& ctx, bool enabled) : ctx_(ctx), enabled_(enabled) {}
  ~GraphRunner();
  GraphRunner(const GraphRunner&) = delete;
  GraphRunner& operator=(const GraphRunner&) = delete;

  void run(const Key& key, const std::function<void()>& launches);

  int64_t num_captures() const { return num_captures_; }
  int64_t num_replays() const { return num_replays_; }

 private:
  void launch(const Key& key, const std::function<void()>& launches);

  const Context& ctx_;
  bool enabled_;
  std::map<Key, void*> graphs_;  // cudaGraphExec_t; null: seen once
  int64_t num_captures_ = 0, num_replays_ = 0;
};

}  // namespace cpmcu
