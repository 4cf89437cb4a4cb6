// All device memory of an engine: two planning passes, then one allocation.
//
// Pass 1: each component adds its buffers to the plan. A persistent buffer lives for ever. A
// scratch buffer lives from phase `first` to phase `last` of a forward step, both included. Scratch
// buffers of the same name are one buffer, so all layers use the same scratch. Pages of the KV
// cache live in all phases but the last one, the loading of weights.
//
// Pass 2: `assign` gives each buffer an offset. Two buffers share bytes only if their lifetimes do
// not overlap. Then the arena allocates once. Nothing allocates device memory after that.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/tensor.h"

namespace cpmcu {

class MemoryPlan {
 public:
  static constexpr int64_t kAlignment = 256;
  static constexpr int kForever = -1;

  struct Buffer {
    std::string name;
    std::string group;  // one of "weights", "state", "kv" and "scratch"
    int64_t bytes = 0;
    int first = kForever;
    int last = kForever;
    int64_t offset = -1;
    bool persistent() const { return first == kForever; }
  };
  using Id = int;

  Id add(const std::string& name, const std::string& group, int64_t bytes);
  Id add_scratch(const std::string& name, int64_t bytes, int first, int last);
  // Adds a buffer that lives from the first phase to phase `last`.
  Id add_until(const std::string& name, const std::string& group, int64_t bytes, int last);
  // Assigns offsets; returns the total. May be called again after more buffers were added.
  int64_t assign();
  // The total of the buffers that live before phase `phase`.
  int64_t bytes_before(int phase) const;

  int64_t total_bytes() const { return total_bytes_; }
  // The sum of the sizes, as if no buffers shared bytes.
  int64_t group_bytes(const std::string& group) const;
  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  std::vector<Buffer> buffers_;
  int64_t total_bytes_ = 0;
};

// Owns the allocation that a plan describes.
class Arena {
 public:
  Arena() = default;
  Arena(Device device, const MemoryPlan& plan);
  // Reserves host addresses for a plan, to list the tensors of a model that is not loaded. The
  // system gives memory only to pages that are written, so the plan may be larger than the memory.
  static std::unique_ptr<Arena> of_addresses(const MemoryPlan& plan);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Tensor tensor(MemoryPlan::Id id, DType dtype, std::initializer_list<int64_t> shape) const;
  template <typename T>
  T* array(MemoryPlan::Id id) const {
    return static_cast<T*>(pointer(id));
  }

 private:
  void* pointer(MemoryPlan::Id id) const;

  Device device_;
  const MemoryPlan* plan_ = nullptr;
  char* base_ = nullptr;
  bool is_mapped_ = false;  // made by of_addresses
};

}  // namespace cpmcu
