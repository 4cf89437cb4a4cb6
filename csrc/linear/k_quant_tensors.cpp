// Layout "k_quants": K-quants of llama.cpp, w = d s q - e m. K is a multiple of 256. Options:
//
//   format     codes                      s                             m
//   "q4_k"     weight_packed uint8 [N, K / 2]  weight_group_scale [N, K / 32]   weight_group_min
//   "q6_k"     weight int8 [N, K]              weight_group_scale [N, K / 16]
//   "q5_k"     weight int8 [N, K]              weight_group_scale [N, K / 16]   weight_group_min
//
// d is weight_scale, e is weight_min, float16 [N, K / 256]. Group scales are int8, minima uint8.
#include <string_view>
#include <vector>

#include "kernels/gemm/packed/k_quant_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

class KQuantTensors : public PackedTensors {
 public:
  explicit KQuantTensors(const LinearConfig& config) {
    const std::string& format = config.options.format;
    CHECK(format == "q4_k" || format == "q5_k" || format == "q6_k",
          "{}: format \"{}\" of K-quants is not known; known are \"q4_k\", \"q5_k\", \"q6_k\"",
          config.stacked_name(), format);
    const bool is_4 = format == "q4_k";
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.codes = is_4 ? Codes::kK4 : Codes::kK8,
                          .minimum = format != "q6_k",
                          .group = is_4 ? 32 : 16},
               .gated = config.gated};
    CHECK(weight_.k % kSuperK == 0, "{} has {} inputs, expected a multiple of {} of K-quants",
          config.stacked_name(), weight_.k, kSuperK);
    int64_t row = 0;
    for (const LinearPart& part : config.parts) {
      CHECK(part.out_features % 8 == 0, "{} has {} outputs, expected a multiple of 8", part.name,
            part.out_features);
      Part made{.name = part.name, .first_row = row};
      const int64_t n = part.out_features, supers = weight_.k / kSuperK;
      const auto add = [&](const char* suffix, DType dtype, int64_t columns) {
        made.tensors.push_back({suffix, dtype, n, columns, num_bytes_});
        num_bytes_ += align_up(n * columns * size_of(dtype));
      };
      add(is_4 ? ".weight_packed" : ".weight", is_4 ? DType::kU8 : DType::kI8,
          is_4 ? weight_.k / 2 : weight_.k);
      add(".weight_scale", DType::kF16, supers);
      add(".weight_group_scale", DType::kI8, weight_.k / weight_.layout.group);
      if (weight_.layout.minimum) {
        add(".weight_min", DType::kF16, supers);
        add(".weight_group_min", DType::kU8, weight_.k / weight_.layout.group);
      }
      row += n;
      parts_.push_back(made);
    }
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    for (const Part& part : parts_) {
      for (const Stored& each : part.tensors) {
        table.add(prefix + part.name + each.suffix, view(each, buffer));
      }
    }
  }

  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override {
    for (const Part& part : parts_) {
      const auto of = [&](size_t i) {
        return i < part.tensors.size() ? view(part.tensors[i], buffer) : Tensor();
      };
      k_quant_pack(ctx, {.w = weight,
                         .codes = of(0),
                         .scales = of(1),
                         .group_scales = of(2),
                         .mins = of(3),
                         .group_mins = of(4),
                         .first_row = part.first_row});
    }
  }

 private:
  struct Stored {
    const char* suffix;
    DType dtype;
    int64_t rows, columns, at;  // `at`: byte offset in the buffer
  };
  struct Part {
    std::string name;
    int64_t first_row = 0;
    std::vector<Stored> tensors{};
  };

  static Tensor view(const Stored& of, char* buffer) {
    return {buffer + of.at, of.dtype, {of.rows, of.columns}};
  }

  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t num_bytes_ = 0;
};

REGISTER_LAYOUT("k_quants", KQuantTensors);

}  // namespace
}  // namespace cpmcu
