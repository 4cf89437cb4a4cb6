// Layout "fp8": e4m3 `weight` [N, K] and its scales, as Qwen, DeepSeek, compressed-tensors and
// ModelOpt write them. w = e4m3 * scale. Options:
//
//   format      name of the scales           shape
//   "inverse"   weight_scale_inv             [ceil(N / 128), ceil(K / 128)]
//   "block"     weight_scale                 the same
//   "channel"   weight_scale                 [N, 1]
//   "tensor"    weight_scale                 [1, 1]
//
// Scales are float32 here; the loader converts them exactly from 16 bits.
#include <vector>

#include "kernels/gemm/packed/code8_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

constexpr int64_t kBlock = 128;

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

class Fp8Tensors : public PackedTensors {
 public:
  explicit Fp8Tensors(const LinearConfig& config)
      : suffix_(config.options.format == "inverse" ? ".weight_scale_inv" : ".weight_scale") {
    const std::string& format_name = config.options.format;
    const bool blocks = format_name == "inverse" || format_name == "block";
    const bool channels = format_name == "channel";
    CHECK(blocks || channels || format_name == "tensor",
          "{}: format \"{}\" of FP8 weights is not known; known are \"inverse\", \"block\", "
          "\"channel\", \"tensor\"",
          config.stacked_name(), format_name);
    const int64_t k = config.in_features;
    bool by_eight = !channels;  // eight rows share a scale
    int64_t row = 0;
    for (const LinearPart& part : config.parts) {
      const int64_t n = part.out_features;
      Part made{.name = part.name, .first_row = row, .n = n};
      made.rows_per_scale = blocks ? kBlock : channels ? 1 : n;
      made.k_per_scale = blocks ? kBlock : k;
      made.scale_rows = (n + made.rows_per_scale - 1) / made.rows_per_scale;
      made.scale_columns = (k + made.k_per_scale - 1) / made.k_per_scale;
      made.codes_at = num_bytes_;
      made.scales_at = made.codes_at + align_up(n * k);
      num_bytes_ = made.scales_at + align_up(4 * made.scale_rows * made.scale_columns);
      by_eight = by_eight && row % 8 == 0;
      row += n;
      parts_.push_back(made);
    }
    weight_ = {.n = config.out_features(),
               .k = k,
               .layout = {.codes = Codes::kE4m3, .scale_rows = by_eight ? 8 : 1},
               .gated = config.gated};
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    for (const Part& part : parts_) {
      table.add(prefix + part.name + ".weight", codes_of(part, buffer));
      table.add(prefix + part.name + suffix_, scales_of(part, buffer));
    }
  }

  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override {
    for (const Part& part : parts_) {
      code8_pack(ctx, {.w = weight,
                       .codes = codes_of(part, buffer),
                       .scales = scales_of(part, buffer),
                       .first_row = part.first_row,
                       .rows_per_scale = part.rows_per_scale,
                       .k_per_scale = part.k_per_scale});
    }
  }

 private:
  struct Part {
    std::string name;
    int64_t first_row = 0, n = 0;
    int64_t rows_per_scale = 1, k_per_scale = 1, scale_rows = 0, scale_columns = 0;
    int64_t codes_at = 0, scales_at = 0;  // byte offsets in the buffer
  };

  Tensor codes_of(const Part& part, char* buffer) const {
    return {buffer + part.codes_at, DType::kE4M3, {part.n, weight_.k}};
  }
  static Tensor scales_of(const Part& part, char* buffer) {
    return {buffer + part.scales_at, DType::kF32, {part.scale_rows, part.scale_columns}};
  }

  std::string suffix_;
  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t num_bytes_ = 0;
};

REGISTER_LAYOUT("fp8", Fp8Tensors);

}  // namespace
}  // namespace cpmcu
