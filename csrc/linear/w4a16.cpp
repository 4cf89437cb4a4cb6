// Linear method "w4a16": 4-bit weights of GPTQ, AWQ, compressed-tensors and CPM.cu's Marlin files.
//
// A checkpoint's tensors are streamed unchanged into the buffer that will hold the weight blocks.
// Once all are loaded, the device repacks them. Options: "format" (W4Format), "group_size" (128 or
// -1), "zero_points", "bfloat16_scales", and "fused" (the parts are one tensor under the stacked
// name).
#include "kernels/gemm/w4a16.h"

#include "linear/w4_matrix.h"

namespace cpmcu {
namespace {

int option(const LinearConfig& config, const std::string& name, int fallback) {
  const auto it = config.options.find(name);
  return it == config.options.end() ? fallback : it->second;
}

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

class W4A16Linear : public LinearMethod {
 public:
  explicit W4A16Linear(const LinearConfig& config)
      : name_(config.stacked_name()),
        dtype_(config.dtype),
        format_(static_cast<W4Format>(option(config, "format", -1))),
        by_row_(format_ == W4Format::kCompressed),
        matrix_(
            {.n = config.out_features(),
             .k = config.in_features,
             .zero_points = option(config, "zero_points", 0) != 0,
             .scale_dtype = option(config, "bfloat16_scales", 0) != 0 ? DType::kBF16 : DType::kF16,
             .gated = config.gated}) {
    const int format = static_cast<int>(format_), group = option(config, "group_size", 0);
    CHECK(format >= 0 && format <= static_cast<int>(W4Format::kMarlin),
          "{}: format {} of 4-bit weights is unknown, expected 0 to {}", name_, format,
          static_cast<int>(W4Format::kMarlin));
    CHECK(group == kW4BlockK || group == -1, "{}: group_size is {}, expected {} or -1", name_,
          group, kW4BlockK);
    const int64_t k = config.in_features;
    const bool tiled = format_ == W4Format::kMarlin;
    const int64_t n_factor = by_row_ ? 1 : tiled ? 64 : 8, k_factor = tiled ? 16 : 8;
    CHECK(!tiled || group != -1 || k > kW4BlockK,
          "{} has {} inputs and channel-wise scales, expected more than {} inputs in this format",
          name_, k, kW4BlockK);
    const int64_t groups = group == -1 ? 1 : (k + kW4BlockK - 1) / kW4BlockK;
    std::vector<LinearPart> parts = config.parts;
    if (option(config, "fused", 0) != 0) parts = {{name_, config.out_features()}};
    int64_t row = 0, bytes = 0;
    for (const LinearPart& part : parts) {
      const int64_t n = part.out_features;
      CHECK(n % n_factor == 0 && k % k_factor == 0,
            "{} is [{}, {}], expected multiples of {} and {} of 4-bit weights in this format",
            part.name, n, k, n_factor, k_factor);
      Part made{.name = part.name, .first_row = row, .n = n};
      if (by_row_) {
        made.q_shape = {n, k / 8};
        made.scales_shape = {n, groups};
        made.zeros_shape = {(n + 7) / 8, groups};
      } else {
        made.q_shape = {k / 8, n};
        if (format_ == W4Format::kAwq) made.q_shape = {k, n / 8};
        if (tiled) made.q_shape = {k / 16, 2 * n};
        made.scales_shape = {groups, n};
        made.zeros_shape = {groups, n / 8};
      }
      made.q_at = bytes;
      made.scales_at = made.q_at + align_up(4 * made.q_shape.size());
      made.zeros_at = made.scales_at + align_up(2 * made.scales_shape.size());
      bytes = made.zeros_at;
      if (matrix_.weight().zero_points) bytes += align_up(4 * made.zeros_shape.size());
      row += n;
      parts_.push_back(made);
    }
    raw_bytes_ = bytes;
  }

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    matrix_.plan(plan, name_, dtype_, limits, raw_bytes_);
    load_id_ = plan.add_scratch("w4.load", raw_bytes_, kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    matrix_.bind(arena);
    load_ = arena.array<char>(load_id_);
  }

  void list_tensors(WeightTable& table) override {
    auto* buffer = static_cast<char*>(matrix_.weight().blocks);
    for (const Part& part : parts_) {
      table.add(part.name + (by_row_ ? ".weight_packed" : ".qweight"), q_of(part, buffer));
      table.add(part.name + (by_row_ ? ".weight_scale" : ".scales"), scales_of(part, buffer));
      if (!matrix_.weight().zero_points) continue;
      table.add(part.name + (by_row_ ? ".weight_zero_point" : ".qzeros"), zeros_of(part, buffer));
    }
  }

  // All layers share the scratch; the stream orders their copies.
  void finish_loading(const Context& ctx) override {
    copy_on_device(ctx.device, load_, matrix_.weight().blocks, raw_bytes_, ctx.stream);
    for (const Part& part : parts_) {
      w4_pack(ctx, {.w = matrix_.weight(),
                    .format = format_,
                    .q = q_of(part, load_),
                    .scales = scales_of(part, load_),
                    .zeros = matrix_.weight().zero_points ? zeros_of(part, load_) : Tensor(),
                    .first_row = part.first_row,
                    .n = part.n,
                    .k = matrix_.weight().k});
    }
    matrix_.prepare(ctx);
  }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    matrix_.forward(ctx, phase, y, x, alpha, beta);
  }

  void forward_gated(const Context& ctx, Phase phase, const Tensor& out, const Tensor& gate_up,
                     const Tensor& x) const override {
    matrix_.forward_gated(ctx, phase, out, gate_up, x);
  }

 private:
  struct Shape {
    int64_t rows = 0, columns = 0;
    int64_t size() const { return rows * columns; }
  };
  struct Part {
    std::string name;
    int64_t first_row = 0, n = 0;
    Shape q_shape{}, scales_shape{}, zeros_shape{};
    int64_t q_at = 0, scales_at = 0, zeros_at = 0;  // byte offsets in the buffer
  };

  static Tensor view(char* at, DType dtype, const Shape& shape) {
    return {at, dtype, {shape.rows, shape.columns}};
  }
  static Tensor q_of(const Part& part, char* buffer) {
    return view(buffer + part.q_at, DType::kI32, part.q_shape);
  }
  Tensor scales_of(const Part& part, char* buffer) const {
    return view(buffer + part.scales_at, matrix_.weight().scale_dtype, part.scales_shape);
  }
  static Tensor zeros_of(const Part& part, char* buffer) {
    return view(buffer + part.zeros_at, DType::kI32, part.zeros_shape);
  }

  std::string name_;
  DType dtype_;
  W4Format format_;
  bool by_row_;  // the tensors are [N, ...]
  W4Matrix matrix_;
  std::vector<Part> parts_;
  int64_t raw_bytes_ = 0;
  MemoryPlan::Id load_id_ = 0;
  char* load_ = nullptr;
};

REGISTER_LINEAR("w4a16", W4A16Linear);

}  // namespace
}  // namespace cpmcu
