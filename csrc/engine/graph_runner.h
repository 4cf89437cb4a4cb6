// Runs a step's launches as one CUDA graph, captured lazily and kept by key. Beyond a maximum
// number, the least recently used graph is deleted.
//
// The first run of a key is eager: it loads every kernel, and a shape that occurs once needs no
// graph. The second run is captured, later runs replay the graph. The key holds only values that
// change launch shapes. Lengths, positions and ids are in device memory, so a graph stays valid
// while a sequence grows.
//
// If engines of a process share a device, only one of them runs at a time: some kernels need the
// whole device (kernels/gemm/fused_layer.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "core/context.h"
#include "speculative/drafter.h"

namespace cpmcu {

class GraphRunner {
 public:
  static constexpr size_t kMaxGraphs = 128;
  // The part of a decode step that a graph runs.
  enum class Part { kWhole, kPropose, kVerify, kAccept };
  struct Key {
    int num_seqs = 0;
    int max_kv = 0;  // KV entries of the longest sequence, rounded up to a bucket
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
  struct Entry {
    void* graph = nullptr;  // cudaGraphExec_t; null: the key has run once, without a graph
    uint64_t last_use = 0;
  };

  void launch(const Key& key, const std::function<void()>& launches);
  void drop_oldest();

  const Context& ctx_;
  bool enabled_;
  std::map<Key, Entry> graphs_;
  uint64_t num_uses_ = 0;
  int64_t num_captures_ = 0, num_replays_ = 0;
};

}  // namespace cpmcu
