// Collects successive GEMMs into one fused layer launch (kernels/gemm/fused_layer.h).
//
// A forward pass runs its layers with the queue's context. Linear methods, the norms between them,
// attention_combine before them and rotary_kv after them are queued here. Any other launch flushes
// the queue first. So layers need not know which launches are fused. If the fused kernel does not
// run, the context has no queue.
#pragma once

#include <functional>
#include <vector>

#include "kernels/gemm/fused_layer.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/step/step.h"

namespace cpmcu {

class GemmQueue final : public PendingLaunches {
 public:
  // Queues only in a decode pass; other passes have too many rows. `order`: records 4-bit weights
  // in launch order, so that the next pass can look up the weights that follow; null: no record.
  GemmQueue(const Context& ctx, Phase phase, std::vector<PackedWeight>* order = nullptr)
      : plain_(ctx), queued_(ctx), order_(order) {
    if (phase == Phase::kDecode && fused_layer_runs(ctx)) queued_.pending = this;
  }
  ~GemmQueue() override = default;
  GemmQueue(const GemmQueue&) = delete;
  GemmQueue& operator=(const GemmQueue&) = delete;

  // The queue of a context; null: none.
  static GemmQueue* of(const Context& ctx) { return dynamic_cast<GemmQueue*>(ctx.pending); }

  const Context& context() const { return queued_; }

  // The push functions queue an op and return whether it was accepted.
  //
  // A GEMM; `memory` is FusedLayerParams::memory.
  bool push(const FusedGemm& gemm, const Tensor& memory);
  // A norm: accepted if its x is y of the last GEMM, or `hidden` of the last moe_combine.
  bool push(const RmsNormParams& norm);
  // moe_combine, for the norm that reads its `hidden`. Always accepted.
  void push(const MoeCombineParams& combine);
  // Takes back the queued norm whose output is x, and runs what is before it. Empty: there is none.
  RmsNormParams take_norm(const Tensor& x);
  // attention_combine, for the GEMM that reads its `out`. Always accepted.
  void push(const AttentionParams& attention);
  // rotary_kv: accepted if its qkv is y of the last GEMM. Nothing can follow it.
  bool push(const RotaryKvParams& rotary);
  // Runs `launch`, which reads the residual stream, after the queued launches. It must not flush
  // the queue: GEMMs are fused alike whether or not their results are read.
  void then(std::function<void()> launch);
  void flush() override;

 private:
  void note(const PackedWeight& weight);
  std::vector<PackedWeight> following() const;

  const Context& plain_;
  Context queued_;
  std::vector<PackedWeight>* order_;
  size_t next_ = 0;  // index in order_
  std::vector<FusedGemm> gemms_;
  RmsNormParams norm_;         // after the last GEMM, until a GEMM reads it; empty: none
  RotaryKvParams rotary_;      // after the last GEMM
  AttentionParams attention_;  // before the first GEMM
  MoeCombineParams combine_;   // alone in the queue; hidden empty: none
  std::vector<std::function<void()>> after_;
  Tensor memory_;
};

}  // namespace cpmcu
