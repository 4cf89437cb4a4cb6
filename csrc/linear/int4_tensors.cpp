// Layout "int4": the tensors of GPTQ, AWQ, compressed-tensors and CPM.cu's Marlin files. Options:
// format, group_size (16, 32, 64, 128 or -1), zero_points, scale_dtype, stacked.
#include <iterator>
#include <string_view>
#include <vector>

#include "kernels/gemm/packed/int4_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

// LinearOptions::format of each Int4Format, in order.
constexpr std::string_view kFormats[] = {"gptq", "gptq_v2", "awq", "compressed", "marlin"};

Int4Format format_of(const LinearConfig& config) {
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (config.options.format == kFormats[i]) return static_cast<Int4Format>(i);
  }
  throw Error(ErrorKind::kInvalid,
              format_text("{}: format \"{}\" of 4-bit weights is not known; known are \"gptq\", "
                          "\"gptq_v2\", \"awq\", \"compressed\", \"marlin\"",
                          config.stacked_name(), config.options.format));
}

// The group size of scales in weight blocks; 0: a block has one group.
int group_in_blocks(int group_size) {
  return group_size == 16 ? 16 : group_size == 32 || group_size == 64 ? 32 : 0;
}

class Int4Tensors : public PackedTensors {
 public:
  explicit Int4Tensors(const LinearConfig& config);

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }
  void list(WeightTable& table, char* buffer, const std::string& prefix) const override;
  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override;

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
    return view(buffer + part.scales_at, weight_.layout.scale_dtype, part.scales_shape);
  }
  static Tensor zeros_of(const Part& part, char* buffer) {
    return view(buffer + part.zeros_at, DType::kI32, part.zeros_shape);
  }

  Int4Format format_;
  bool by_row_;  // the tensors begin with dimension N
  int64_t k_per_scale_ = kPackedK;
  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t num_bytes_ = 0;
};

Int4Tensors::Int4Tensors(const LinearConfig& config)
    : format_(format_of(config)),
      by_row_(format_ == Int4Format::kCompressed),
      weight_({.n = config.out_features(),
               .k = config.in_features,
               .layout = {.zero_points = config.options.zero_points,
                          .scale_dtype = config.options.scale_dtype,
                          .group = group_in_blocks(config.options.group_size)},
               .gated = config.gated}) {
  const std::string& name = config.stacked_name();
  const int group = config.options.group_size;
  CHECK(group_in_blocks(group) > 0 || group == kPackedK || group == -1,
        "{}: group_size is {}, expected 16, 32, 64, {} or -1", name, group, kPackedK);
  const int64_t k = config.in_features;
  const bool tiled = format_ == Int4Format::kMarlin;
  const int64_t n_factor = by_row_ ? 1 : tiled ? 64 : 8, k_factor = tiled ? 16 : 8;
  CHECK(!tiled || group != -1 || k > kPackedK,
        "{} has {} inputs and channel-wise scales, expected more than {} inputs in this format",
        name, k, kPackedK);
  k_per_scale_ = group == -1 ? kPackedK : group;
  const int64_t groups = group == -1 ? 1 : (k + group - 1) / group;
  std::vector<LinearPart> parts = config.parts;
  if (config.options.stacked) parts = {{name, config.out_features()}};
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
      if (format_ == Int4Format::kAwq) made.q_shape = {k, n / 8};
      if (tiled) made.q_shape = {k / 16, 2 * n};
      made.scales_shape = {groups, n};
      made.zeros_shape = {groups, n / 8};
    }
    made.q_at = bytes;
    made.scales_at = made.q_at + align_up(4 * made.q_shape.size());
    made.zeros_at = made.scales_at + align_up(2 * made.scales_shape.size());
    bytes = made.zeros_at;
    if (weight_.layout.zero_points) bytes += align_up(4 * made.zeros_shape.size());
    row += n;
    parts_.push_back(made);
  }
  num_bytes_ = bytes;
}

void Int4Tensors::list(WeightTable& table, char* buffer, const std::string& prefix) const {
  for (const Part& part : parts_) {
    const std::string name = prefix + part.name;
    table.add(name + (by_row_ ? ".weight_packed" : ".qweight"), q_of(part, buffer));
    table.add(name + (by_row_ ? ".weight_scale" : ".scales"), scales_of(part, buffer));
    if (!weight_.layout.zero_points) continue;
    table.add(name + (by_row_ ? ".weight_zero_point" : ".qzeros"), zeros_of(part, buffer));
  }
}

void Int4Tensors::pack(const Context& ctx, const PackedWeight& weight, char* buffer) const {
  for (const Part& part : parts_) {
    int4_pack(ctx, {.w = weight,
                    .format = format_,
                    .q = q_of(part, buffer),
                    .scales = scales_of(part, buffer),
                    .zeros = weight.layout.zero_points ? zeros_of(part, buffer) : Tensor(),
                    .first_row = part.first_row,
                    .n = part.n,
                    .k = weight.k,
                    .k_per_scale = k_per_scale_});
  }
}

REGISTER_LAYOUT("int4", Int4Tensors);

}  // namespace
}  // namespace cpmcu
