// Layout "float_groups": float codes with a scale for each group of k, under the names of each
// tool. Options: format, stacked.
//
//   format            codes                      scales                     of the matrix
//   "nvfp4"           weight_packed [N, K / 2]   weight_scale [N, K / 16]   weight_global_scale
//   "nvfp4_modelopt"  weight                     weight_scale               weight_scale_2
//   "mxfp4"           weight_packed              weight_scale [N, K / 32]
//   "mxfp4_modelopt"  weight                     weight_scale
//   "mxfp4_blocks"    blocks [N, K / 32, 16]     scales
//   "mxfp8"           weight e4m3 [N, K]         weight_scale
//
// Codes of 4 bits are e2m1, two in a byte of uint8, the even k in its low nibble. Scales for 16 k
// are e4m3; scales for 32 k are powers of two, uint8. A weight is divided by
// weight_global_scale, or multiplied by weight_scale_2.
//
// "mxfp4_blocks" is gpt-oss's: one tensor for the parts of a matrix, in which rows of gate and of
// up alternate.
#include <vector>

#include "kernels/gemm/packed/float_group_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

struct Format {
  std::string_view name;
  Codes codes;
  int group;
  const char* of_codes;  // suffix of the names of codes
  const char* of_scales;
  const char* of_factor;  // suffix of the names of factors; null: there are none
};

constexpr Format kFormats[] = {
    {"nvfp4", Codes::kE2m1, 16, ".weight_packed", ".weight_scale", ".weight_global_scale"},
    {"nvfp4_modelopt", Codes::kE2m1, 16, ".weight", ".weight_scale", ".weight_scale_2"},
    {"mxfp4", Codes::kE2m1, 32, ".weight_packed", ".weight_scale", nullptr},
    {"mxfp4_modelopt", Codes::kE2m1, 32, ".weight", ".weight_scale", nullptr},
    {"mxfp4_blocks", Codes::kE2m1, 32, ".blocks", ".scales", nullptr},
    {"mxfp8", Codes::kE4m3, 32, ".weight", ".weight_scale", nullptr},
};

const Format& format_of(const LinearConfig& config) {
  std::string known;
  for (const Format& each : kFormats) {
    if (config.options.format == each.name) return each;
    known += (known.empty() ? "\"" : ", \"") + std::string(each.name) + "\"";
  }
  throw Error(ErrorKind::kInvalid,
              format_text("{}: format \"{}\" of floats with group scales is not "
                          "known; known are {}",
                          config.stacked_name(), config.options.format, known));
}

class FloatGroupTensors : public PackedTensors {
 public:
  explicit FloatGroupTensors(const LinearConfig& config) : format_(format_of(config)) {
    is_blocks_ = format_.name == "mxfp4_blocks";
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.codes = format_.codes, .scale_rows = 8, .group = format_.group},
               .gated = config.gated};
    CHECK(weight_.k % format_.group == 0,
          "{} has {} inputs, expected a multiple of {}, the k of a scale", config.stacked_name(),
          weight_.k, format_.group);
    std::vector<LinearPart> parts = config.parts;
    if (is_blocks_ || config.options.stacked) parts = {{config.stacked_name(), weight_.n}};
    int64_t row = 0;
    for (const LinearPart& part : parts) {
      const int64_t n = part.out_features;
      CHECK(n % 8 == 0, "{} has {} outputs, expected a multiple of 8", part.name, n);
      Part made{.name = part.name, .first_row = row, .n = n};
      made.codes_at = num_bytes_;
      made.scales_at = made.codes_at + align_up(n * weight_.k * weight_.layout.bits() / 8);
      made.factor_at = made.scales_at + align_up(n * weight_.k / format_.group);
      num_bytes_ = made.factor_at + align_up(4);
      row += n;
      parts_.push_back(made);
    }
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    for (const Part& part : parts_) {
      const std::string name = prefix + part.name;
      Tensor codes = codes_of(part, buffer);
      if (is_blocks_) codes = codes.view({part.n, weight_.k / format_.group, format_.group / 2});
      table.add(name + format_.of_codes, codes);
      table.add(name + format_.of_scales, scales_of(part, buffer));
      if (format_.of_factor != nullptr) {
        table.add(name + format_.of_factor, factor_of(part, buffer));
      }
    }
  }

  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override {
    for (const Part& part : parts_) {
      float_group_pack(ctx,
                       {.w = weight,
                        .codes = codes_of(part, buffer),
                        .scales = scales_of(part, buffer),
                        .powers = format_.group == 32,
                        .factor = format_.of_factor != nullptr ? factor_of(part, buffer) : Tensor(),
                        .divides = format_.name == "nvfp4",
                        .first_row = part.first_row,
                        .interleaved = is_blocks_ && weight.gated});
    }
  }

 private:
  struct Part {
    std::string name;
    int64_t first_row = 0, n = 0;
    int64_t codes_at = 0, scales_at = 0, factor_at = 0;  // byte offsets in the buffer
  };

  Tensor codes_of(const Part& part, char* buffer) const {
    const bool half = weight_.layout.bits() == 4;
    return {buffer + part.codes_at,
            half ? DType::kU8 : DType::kE4M3,
            {part.n, half ? weight_.k / 2 : weight_.k}};
  }
  Tensor scales_of(const Part& part, char* buffer) const {
    return {buffer + part.scales_at,
            format_.group == 16 ? DType::kE4M3 : DType::kU8,
            {part.n, weight_.k / format_.group}};
  }
  static Tensor factor_of(const Part& part, char* buffer) {
    return {buffer + part.factor_at, DType::kF32, {1}};
  }

  const Format& format_;
  bool is_blocks_;
  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t num_bytes_ = 0;
};

REGISTER_LAYOUT("float_groups", FloatGroupTensors);

}  // namespace
}  // namespace cpmcu
