// Layout "int8": integers of 8 bits, w = (q - z) * scale. Options:
//
//   format          codes                        scales, G = K / group_size rounded up (-1: 1)
//   "gptq"          qweight int32 [K / 4, N]     scales [G, N], qzeros [G, N / 4] with z - 1
//   "gptq_v2"       the same                     the same, qzeros with z
//   "compressed"    weight_packed int32 [N, K/4] weight_scale [N, G], weight_zero_point [N / 4, G]
//   "plain"         weight int8 [N, K]           weight_scale [N, G]; holds q - 128
//   "plain_tensor"  the same                     weight_scale [1, 1]
//
//   group_size (a multiple of 32, or -1), zero_points (else z is 128), scale_dtype
#include <string_view>
#include <vector>

#include "kernels/gemm/packed/int8_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

constexpr int kGroup = 32;  // inputs (k) that share a scale in weight blocks

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

class Int8Tensors : public PackedTensors {
 public:
  explicit Int8Tensors(const LinearConfig& config) : format_(config.options.format) {
    const LinearOptions& options = config.options;
    const std::string& name = config.stacked_name();
    is_gptq_ = format_ == "gptq" || format_ == "gptq_v2";
    CHECK(is_gptq_ || format_ == "compressed" || format_ == "plain" || format_ == "plain_tensor",
          "{}: format \"{}\" of 8-bit integers is not known; known are \"gptq\", \"gptq_v2\", "
          "\"compressed\", \"plain\", \"plain_tensor\"",
          name, format_);
    CHECK(!options.zero_points || is_gptq_ || format_ == "compressed",
          "{}: format \"{}\" of 8-bit integers has no zero points", name, format_);
    CHECK(options.group_size == -1 || (options.group_size > 0 && options.group_size % kGroup == 0),
          "{}: group_size is {}, expected a multiple of {}, or -1", name, options.group_size,
          kGroup);
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.codes = Codes::kInt8,
                          .zero_points = options.zero_points,
                          .scale_dtype = options.scale_dtype,
                          .group = kGroup},
               .gated = config.gated};
    const int64_t k = weight_.k;
    k_per_scale_ = options.group_size == -1 ? k : options.group_size;
    groups_ = (k + k_per_scale_ - 1) / k_per_scale_;
    int64_t row = 0;
    for (const LinearPart& part : config.parts) {
      const int64_t n = part.out_features;
      CHECK(n % 8 == 0 && k % 8 == 0, "{} is [{}, {}], expected multiples of 8 of 8-bit weights",
            part.name, n, k);
      Part made{.name = part.name, .first_row = row, .n = n};
      made.codes_at = num_bytes_;
      made.scales_at = made.codes_at + align_up(n * k);
      made.zeros_at = made.scales_at + align_up(2 * n * groups_);
      num_bytes_ = made.zeros_at + (options.zero_points ? align_up(n * groups_) : 0);
      row += n;
      parts_.push_back(made);
    }
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    const bool compressed = format_ == "compressed";
    for (const Part& part : parts_) {
      const std::string name = prefix + part.name;
      Tensor codes = codes_of(part, buffer);
      if (compressed) codes = Tensor(codes.data(), DType::kI32, {part.n, weight_.k / 4});
      table.add(name + (is_gptq_ ? ".qweight" : compressed ? ".weight_packed" : ".weight"), codes);
      table.add(name + (is_gptq_ ? ".scales" : ".weight_scale"), scales_of(part, buffer));
      if (!weight_.layout.zero_points) continue;
      table.add(name + (is_gptq_ ? ".qzeros" : ".weight_zero_point"), zeros_of(part, buffer));
    }
  }

  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override {
    for (const Part& part : parts_) {
      int8_pack(ctx, {.w = weight,
                      .codes = codes_of(part, buffer),
                      .scales = scales_of(part, buffer),
                      .zeros = weight.layout.zero_points ? zeros_of(part, buffer) : Tensor(),
                      .zero_offset = format_ == "gptq" ? 1 : 0,
                      .first_row = part.first_row,
                      .k_per_scale = k_per_scale_});
    }
  }

 private:
  struct Part {
    std::string name;
    int64_t first_row = 0, n = 0;
    int64_t codes_at = 0, scales_at = 0, zeros_at = 0;  // byte offsets in the buffer
  };

  Tensor codes_of(const Part& part, char* buffer) const {
    char* at = buffer + part.codes_at;
    if (is_gptq_) return {at, DType::kI32, {weight_.k / 4, part.n}};
    return {at, format_ == "compressed" ? DType::kU8 : DType::kI8, {part.n, weight_.k}};
  }
  Tensor scales_of(const Part& part, char* buffer) const {
    char* at = buffer + part.scales_at;
    if (is_gptq_) return {at, weight_.layout.scale_dtype, {groups_, part.n}};
    const int64_t rows = format_ == "plain_tensor" ? 1 : part.n;
    return {at, weight_.layout.scale_dtype, {rows, groups_}};
  }

  Tensor zeros_of(const Part& part, char* buffer) const {
    char* at = buffer + part.zeros_at;
    if (is_gptq_) return {at, DType::kI32, {groups_, part.n / 4}};
    return {at, DType::kI32, {part.n / 4, groups_}};
  }

  std::string format_;
  bool is_gptq_ = false;
  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t k_per_scale_ = 0, groups_ = 0, num_bytes_ = 0;
};

REGISTER_LAYOUT("int8", Int8Tensors);

}  // namespace
}  // namespace cpmcu
