// Layout "int8": 8-bit integers as two nibble planes, which the loader splits
// (cpmcu/quant/int8.py). Each plane of a module NAME is a 4-bit matrix with zero points:
// "NAME.high.qweight" and "NAME.low.qweight" int32 [K' / 8, N], nibble i of a word is k = 8 row +
// i, K' is K rounded up to 128; ".scales" [G, N] and ".qzeros" int32 [G, N / 8] likewise. The
// scales of the high plane are 16 times those of the low plane, and its zero points are 8. Options:
// group_size (128 or -1), scale_dtype.
#include <array>
#include <vector>

#include "kernels/gemm/packed/int4_pack.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

constexpr std::array kPlanes = {".high", ".low"};  // in the order of the weight blocks

int64_t align_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

class Int8Tensors : public PackedTensors {
 public:
  explicit Int8Tensors(const LinearConfig& config) {
    const LinearOptions& options = config.options;
    CHECK(options.group_size == kPackedK || options.group_size == -1,
          "{}: group_size is {}, expected {} or -1", config.stacked_name(), options.group_size,
          kPackedK);
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.planes = 2, .zero_points = true, .scale_dtype = options.scale_dtype},
               .gated = config.gated};
    plane_k_ = align_up(weight_.k, kPackedK);
    groups_ = options.group_size == -1 ? 1 : plane_k_ / kPackedK;
    int64_t row = 0;
    for (const LinearPart& part : config.parts) {
      const int64_t n = part.out_features;
      CHECK(n % 8 == 0, "{} has {} outputs, expected a multiple of 8 of 8-bit weights", part.name,
            n);
      for (size_t plane = 0; plane < kPlanes.size(); ++plane) {
        Part made{.name = part.name + kPlanes[plane],
                  .first_row = row,
                  .n = n,
                  .first_k = static_cast<int64_t>(plane) * plane_k_};
        made.q_at = num_bytes_;
        made.scales_at = made.q_at + align_up(plane_k_ / 2 * n, MemoryPlan::kAlignment);
        made.zeros_at = made.scales_at + align_up(2 * groups_ * n, MemoryPlan::kAlignment);
        num_bytes_ = made.zeros_at + align_up(groups_ * n / 2, MemoryPlan::kAlignment);
        parts_.push_back(made);
      }
      row += n;
    }
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return num_bytes_; }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    for (const Part& part : parts_) {
      table.add(prefix + part.name + ".qweight", q_of(part, buffer));
      table.add(prefix + part.name + ".scales", scales_of(part, buffer));
      table.add(prefix + part.name + ".qzeros", zeros_of(part, buffer));
    }
  }

  // The planes are the two halves of a 4-bit matrix [N, 2 K'].
  void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const override {
    PackedWeight halves = weight;
    halves.k = 2 * plane_k_;
    halves.layout.planes = 1;
    for (const Part& part : parts_) {
      int4_pack(ctx, {.w = halves,
                      .format = Int4Format::kGptqV2,
                      .q = q_of(part, buffer),
                      .scales = scales_of(part, buffer),
                      .zeros = zeros_of(part, buffer),
                      .first_row = part.first_row,
                      .first_k = part.first_k,
                      .n = part.n,
                      .k = plane_k_});
    }
  }

 private:
  struct Part {
    std::string name;
    int64_t first_row = 0, n = 0, first_k = 0;
    int64_t q_at = 0, scales_at = 0, zeros_at = 0;  // byte offsets in the buffer
  };

  Tensor q_of(const Part& part, char* buffer) const {
    return {buffer + part.q_at, DType::kI32, {plane_k_ / 8, part.n}};
  }
  Tensor scales_of(const Part& part, char* buffer) const {
    return {buffer + part.scales_at, weight_.layout.scale_dtype, {groups_, part.n}};
  }
  Tensor zeros_of(const Part& part, char* buffer) const {
    return {buffer + part.zeros_at, DType::kI32, {groups_, part.n / 8}};
  }

  PackedWeight weight_;
  std::vector<Part> parts_;
  int64_t plane_k_ = 0, groups_ = 0, num_bytes_ = 0;
};

REGISTER_LAYOUT("int8", Int8Tensors);

}  // namespace
}  // namespace cpmcu
