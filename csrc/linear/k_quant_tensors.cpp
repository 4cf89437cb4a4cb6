// Layout "k_quants": integers of GGUF with scales of two levels, or with float16 scales for 32 k
// (kernels/gemm/packed/layout.h). The format is a name of kFormats. Tensors of a part [N, K]:
//
//   weight_packed uint8 [N, K / 2] ("k4"), or weight int8 [N, K]
//   weight_records, and weight_min_records of formats with a minimum: uint8
//     [N, ceil(K / 128) * bytes of a record]; with halves, weight_half_records and
//     weight_half_min_records
#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "kernels/gemm/packed/k_quant_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

struct Format {
  std::string_view name;
  Codes codes;
  bool minimum, halves;
};
constexpr Format kFormats[] = {
    {"k4", Codes::kK4, true, false},     {"k4_halves", Codes::kK4, true, true},
    {"k8", Codes::kK8, false, false},    {"k8_halves", Codes::kK8, false, true},
    {"k8_min", Codes::kK8, true, false}, {"k8_min_halves", Codes::kK8, true, true},
};

class KQuantTensors : public PackedTensors {
 public:
  explicit KQuantTensors(const LinearConfig& config) {
    const auto* of =
        std::find_if(std::begin(kFormats), std::end(kFormats),
                     [&](const Format& format) { return format.name == config.options.format; });
    CHECK(of != std::end(kFormats),
          "{}: format \"{}\" of K-quants is not known; known are \"k4\", \"k8\", \"k8_min\", and "
          "each with \"_halves\"",
          config.stacked_name(), config.options.format);
    const bool is_4 = of->codes == Codes::kK4;
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.codes = of->codes,
                          .minimum = of->minimum,
                          .halves = of->halves,
                          .group = is_4 ? 32 : 16},
               .gated = config.gated};
    CHECK(weight_.k % 32 == 0, "{} has {} inputs, expected a multiple of 32", config.stacked_name(),
          weight_.k);
    const int64_t record_columns = weight_.k_blocks() * weight_.layout.record_bytes();
    int64_t row = 0;
    for (const LinearPart& part : config.parts) {
      CHECK(part.out_features % 8 == 0, "{} has {} outputs, expected a multiple of 8", part.name,
            part.out_features);
      Part made{.name = part.name, .first_row = row};
      const int64_t n = part.out_features;
      const auto add = [&](const char* suffix, DType dtype, int64_t columns) {
        made.tensors.push_back({suffix, dtype, n, columns, num_bytes_});
        num_bytes_ += align_up(n * columns * size_of(dtype));
      };
      add(is_4 ? ".weight_packed" : ".weight", is_4 ? DType::kU8 : DType::kI8,
          is_4 ? weight_.k / 2 : weight_.k);
      add(of->halves ? ".weight_half_records" : ".weight_records", DType::kU8, record_columns);
      if (of->minimum) {
        add(of->halves ? ".weight_half_min_records" : ".weight_min_records", DType::kU8,
            record_columns);
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
                         .records = of(1),
                         .min_records = of(2),
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
