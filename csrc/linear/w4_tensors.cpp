#include "linear/w4_tensors.h"

namespace cpmcu {
namespace {

int option(const LinearConfig& config, const std::string& name, int fallback) {
  const auto it = config.options.find(name);
  return it == config.options.end() ? fallback : it->second;
}

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

}  // namespace

W4Tensors::W4Tensors(const LinearConfig& config)
    : format_(static_cast<W4Format>(option(config, "format", -1))),
      by_row_(format_ == W4Format::kCompressed),
      weight_(
          {.n = config.out_features(),
           .k = config.in_features,
           .zero_points = option(config, "zero_points", 0) != 0,
           .scale_dtype = option(config, "bfloat16_scales", 0) != 0 ? DType::kBF16 : DType::kF16,
           .gated = config.gated}) {
  const std::string& name = config.stacked_name();
  const int format = static_cast<int>(format_), group = option(config, "group_size", 0);
  CHECK(format >= 0 && format <= static_cast<int>(W4Format::kMarlin),
        "{}: format {} of 4-bit weights is unknown, expected 0 to {}", name, format,
        static_cast<int>(W4Format::kMarlin));
  CHECK(group == kW4BlockK || group == -1, "{}: group_size is {}, expected {} or -1", name, group,
        kW4BlockK);
  const int64_t k = config.in_features;
  const bool tiled = format_ == W4Format::kMarlin;
  const int64_t n_factor = by_row_ ? 1 : tiled ? 64 : 8, k_factor = tiled ? 16 : 8;
  CHECK(!tiled || group != -1 || k > kW4BlockK,
        "{} has {} inputs and channel-wise scales, expected more than {} inputs in this format",
        name, k, kW4BlockK);
  const int64_t groups = group == -1 ? 1 : (k + kW4BlockK - 1) / kW4BlockK;
  std::vector<LinearPart> parts = config.parts;
  if (option(config, "fused", 0) != 0) parts = {{name, config.out_features()}};
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
    if (weight_.zero_points) bytes += align_up(4 * made.zeros_shape.size());
    row += n;
    parts_.push_back(made);
  }
  num_bytes_ = bytes;
}

void W4Tensors::list(WeightTable& table, char* buffer, const std::string& prefix) const {
  for (const Part& part : parts_) {
    const std::string name = prefix + part.name;
    table.add(name + (by_row_ ? ".weight_packed" : ".qweight"), q_of(part, buffer));
    table.add(name + (by_row_ ? ".weight_scale" : ".scales"), scales_of(part, buffer));
    if (!weight_.zero_points) continue;
    table.add(name + (by_row_ ? ".weight_zero_point" : ".qzeros"), zeros_of(part, buffer));
  }
}

void W4Tensors::pack(const Context& ctx, const W4Weight& weight, char* buffer) const {
  for (const Part& part : parts_) {
    w4_pack(ctx, {.w = weight,
                  .format = format_,
                  .q = q_of(part, buffer),
                  .scales = scales_of(part, buffer),
                  .zeros = weight.zero_points ? zeros_of(part, buffer) : Tensor(),
                  .first_row = part.first_row,
                  .n = part.n,
                  .k = weight.k});
  }
}

}  // namespace cpmcu
