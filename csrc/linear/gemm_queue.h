// Products that follow one another become one launch (kernels/gemm/fused_layer.h).
//
// A forward pass runs its layers with the queue's context. Linear methods, the norms between them,
// attention_combine before and rotary_kv behind them leave their work here; whatever else is
// launched flushes it first. So layers need not know what becomes one launch, and where the kernel
// does not run the context is the plain one.
#pragma once

#include <functional>
#include <vector>

#include "kernels/gemm/fused_layer.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/step/step.h"

namespace cpmcu {

class GemmQueue final : public PendingLaunches {
 public:
  // Of a pass that decodes; others have too many rows. `order`: where 4-bit products are noted as
  // they come, and so those of an earlier pass say what follows; null: nowhere.
  GemmQueue(const Context& ctx, Phase phase, std::vector<W4Weight>* order = nullptr)
      : plain_(ctx), queued_(ctx), order_(order) {
    if (phase == Phase::kDecode && fused_layer_runs(ctx)) queued_.pending = this;
  }
  ~GemmQueue() override = default;
  GemmQueue(const GemmQueue&) = delete;
  GemmQueue& operator=(const GemmQueue&) = delete;

  // The queue of a forward pass; null: its context has none.
  static GemmQueue* of(const Context& ctx) { return dynamic_cast<GemmQueue*>(ctx.pending); }

  const Context& context() const { return queued_; }

  // Whether the product was taken; `memory` is that of fused_layer.
  bool push(const FusedGemm& gemm, const Tensor& memory);
  // Whether the norm was taken: it follows the product that wrote its x.
  bool push(const RmsNormParams& norm);
  // Takes attention_combine, for the product that reads its `out`.
  void push(const AttentionParams& attention);
  // Whether it was taken: it follows the product that wrote its qkv. Nothing can follow it.
  bool push(const RotaryKvParams& rotary);
  // Runs `launch`, which reads the residual stream, once what waits has been launched. It must not
  // flush the queue itself: products are chained alike whoever looks at their results.
  void then(std::function<void()> launch);
  void flush() override;

 private:
  void note(const W4Weight& weight);
  std::vector<W4Weight> following() const;

  const Context& plain_;
  Context queued_;
  std::vector<W4Weight>* order_;
  size_t next_ = 0;  // in order_
  std::vector<FusedGemm> gemms_;
  RmsNormParams norm_;         // behind the last gemm, until a product reads it; empty: none
  RotaryKvParams rotary_;      // behind the last gemm
  AttentionParams attention_;  // before the first
  std::vector<std::function<void()>> after_;
  Tensor memory_;
};

}  // namespace cpmcu
