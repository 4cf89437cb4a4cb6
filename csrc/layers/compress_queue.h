// Collects the compress_keys of all layers of a model into one launch.
//
// Transformer::commit runs the blocks with the queue's context. Any other launch flushes the queue
// first.
#pragma once

#include <utility>

#include "core/context.h"
#include "kernels/attention/sparse.h"

namespace cpmcu {

class CompressQueue final : public PendingLaunches {
 public:
  explicit CompressQueue(const Context& ctx) : plain_(ctx), queued_(ctx) { queued_.pending = this; }
  ~CompressQueue() override = default;
  CompressQueue(const CompressQueue&) = delete;
  CompressQueue& operator=(const CompressQueue&) = delete;

  // The queue of a context; null: none.
  static CompressQueue* of(const Context& ctx) { return dynamic_cast<CompressQueue*>(ctx.pending); }
  const Context& context() const { return queued_; }

  // All calls are of the same step. Layers of another shape take another launch.
  void push(const CompressKeysParams& params) {
    const auto& layers = params.layers;
    if (!params_.layers.empty()) {
      const Tensor &first = params_.layers.front().k_cache, &other = layers.front().k_cache;
      if (first.shape_text() != other.shape_text() || first.dtype() != other.dtype()) flush();
    }
    if (params_.layers.empty()) {
      params_ = params;
    } else {
      params_.layers.insert(params_.layers.end(), layers.begin(), layers.end());
    }
  }
  void flush() override {
    if (params_.layers.empty()) return;
    compress_keys(plain_, std::exchange(params_, {}));
  }

 private:
  const Context& plain_;
  Context queued_;
  CompressKeysParams params_;
};

}  // namespace cpmcu
