// A linear method: how y = alpha * x W^T + beta * y is stored and computed (the quantisation).
//
// Layers, models and drafters do not depend on the method. A method is one file here that ends in
// REGISTER_LINEAR("name", Class), and one file in cpmcu/quant.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/model_spec.h"
#include "core/registry.h"
#include "core/weights.h"
#include "kernels/gemm/fused_layer.h"
#include "kernels/layer/silu_mul.h"
#include "kernels/step/step.h"

namespace cpmcu {

// A linear layer may be several checkpoint tensors stacked by rows (q, k, v; gate, up).
struct LinearPart {
  std::string name;  // name in the checkpoint, without ".weight"
  int64_t out_features = 0;
};

struct LinearConfig {
  std::vector<LinearPart> parts;
  int64_t in_features = 0;
  DType dtype = DType::kBF16;
  LinearOptions options{};
  // Name of the stacked parts, such as "….qkv_proj"; empty: that of the only part.
  std::string name{};
  // Whether the checkpoint has the weights. If false, `load_rows` receives them.
  bool has_tensors = true;
  bool gated = false;  // the parts are an MLP's gate and up; only `forward_gated` is called

  int64_t out_features() const {
    int64_t sum = 0;
    for (const LinearPart& part : parts) sum += part.out_features;
    return sum;
  }
  const std::string& stacked_name() const { return name.empty() ? parts.front().name : name; }
};

// Lists the parts as rows of one dense weight [N, K], under their names in the checkpoint.
inline void list_rows(WeightTable& table, const std::vector<LinearPart>& parts,
                      const Tensor& weight) {
  int64_t row = 0;
  for (const LinearPart& part : parts) {
    table.add(part.name + ".weight", weight.rows(row, part.out_features));
    row += part.out_features;
  }
}

class LinearMethod {
 public:
  virtual ~LinearMethod() = default;
  virtual void plan(MemoryPlan& plan, const StepLimits& limits) = 0;
  virtual void bind(const Arena& arena) = 0;
  virtual void list_tensors(WeightTable& table) = 0;
  // Called once all tensors are loaded: repacks them into the kernel's layout. Default: nothing.
  virtual void finish_loading(const Context&) {}
  // Replaces tensors and finish_loading: row i is row index[i] (null: i) of dense rows [R, K] in
  // the model's dtype; index is in device memory.
  virtual void load_rows(const Context&, const Tensor&, const int*) {
    CHECK_STATE(false, "load_rows was called on a linear method that takes no dense rows");
  }
  // The dense weights [N, K]; empty if there are none. A method that quantises at load has its
  // dense rows until the first step.
  virtual Tensor dense_weight() const { return {}; }
  // y [M, N] = alpha * x [M, K] W^T + beta * y; y has x's dtype or float32.
  virtual void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x,
                       float alpha, float beta) const = 0;
  // out [M, N / 2] = silu(x gate^T) * x up^T; `gate_up` [M, N] is scratch.
  virtual void forward_gated(const Context& ctx, Phase phase, const Tensor& out,
                             const Tensor& gate_up, const Tensor& x) const {
    forward(ctx, phase, gate_up, x, 1, 0);
    silu_mul(ctx, {.out = out, .x = gate_up});
  }
  // The weights for the fused layer kernel, which may replace `forward` and `forward_gated` of a
  // decode pass. Default: none.
  virtual std::optional<FusedForm> fused_form() const { return {}; }
  // Bytes of the weights that `forward` reads; 0: unknown.
  virtual int64_t weight_bytes() const { return 0; }
};

using LinearRegistry = Registry<LinearMethod, const LinearConfig&>;

// Makes the method named `method`; throws if the name is unknown.
inline std::unique_ptr<LinearMethod> make_linear(const std::string& method,
                                                 const LinearConfig& config) {
  return LinearRegistry::instance().create("linear method", method, config);
}

}  // namespace cpmcu

#define REGISTER_LINEAR(name, Class)                                                      \
  static const bool registered_##Class = ::cpmcu::LinearRegistry::instance().add(         \
      name,                                                                               \
      [](const ::cpmcu::LinearConfig& config) -> std::unique_ptr<::cpmcu::LinearMethod> { \
        return std::make_unique<Class>(config);                                           \
      },                                                                                  \
      __FILE__)
