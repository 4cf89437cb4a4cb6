// A plugin that adds a quantisation: weights in {-1, 0, 1}, four to a byte, one float32 scale for
// each row. Compiled by tests/unit/test_extension_points.py; CPU only, simple and slow.
#include "core/half.h"
#include "linear/linear.h"

namespace {

using namespace cpmcu;

class TernaryLinear : public LinearMethod {
 public:
  explicit TernaryLinear(const LinearConfig& config) : config_(config) {}

  void plan(MemoryPlan& plan, const StepLimits&) override {
    const std::string& name = config_.parts.front().name;
    packed_id_ =
        plan.add(name + ".packed", "weights", config_.out_features() * config_.in_features / 4);
    scale_id_ = plan.add(name + ".scale", "weights", 4 * config_.out_features());
  }
  void bind(const Arena& arena) override {
    packed_ =
        arena.tensor(packed_id_, DType::kU8, {config_.out_features(), config_.in_features / 4});
    scale_ = arena.tensor(scale_id_, DType::kF32, {config_.out_features()});
  }
  void list_tensors(WeightTable& table) override {
    int64_t row = 0;
    for (const LinearPart& part : config_.parts) {
      table.add(part.name + ".packed", packed_.rows(row, part.out_features));
      table.add(part.name + ".scale", scale_.rows(row, part.out_features));
      row += part.out_features;
    }
  }
  void forward(const Context&, Phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    const int64_t n = config_.out_features(), k = config_.in_features;
    for (int64_t m = 0; m < x.size(0); ++m) {
      for (int64_t row = 0; row < n; ++row) {
        float sum = 0;
        for (int64_t i = 0; i < k; ++i) {
          const int code = packed_.as<uint8_t>()[(row * k + i) / 4] >> (i % 4 * 2) & 3;
          sum += static_cast<float>(code - 1) * x.as<float>()[m * k + i];
        }
        float& out = y.as<float>()[m * n + row];
        out = alpha * sum * scale_.as<float>()[row] + (beta == 0 ? 0 : beta * out);
      }
    }
  }

 private:
  LinearConfig config_;
  MemoryPlan::Id packed_id_ = 0, scale_id_ = 0;
  Tensor packed_, scale_;
};

REGISTER_LINEAR("test_ternary", TernaryLinear);

}  // namespace
