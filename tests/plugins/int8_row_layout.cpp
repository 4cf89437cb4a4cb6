// A layout of packed weights from outside: int8 codes with a float32 scale for each row, on the
// CPU.
#include <cstring>
#include <vector>

#include "linear/packed_tensors.h"

namespace {

using namespace cpmcu;

// A block: 256 rows of 128 codes, then 256 scales.
constexpr int64_t kCodeBytes = int64_t{kPackedRows} * kPackedK;

float decode(const PackedLayout&, const uint8_t* block, int row, float* to) {
  const auto* codes = reinterpret_cast<const int8_t*>(block) + row * kPackedK;
  for (int k = 0; k < kPackedK; ++k) to[k] = codes[k];
  return reinterpret_cast<const float*>(block + kCodeBytes)[row];
}

class Int8RowTensors : public PackedTensors {
 public:
  explicit Int8RowTensors(const LinearConfig& config) : parts_(config.parts) {
    weight_ = {.n = config.out_features(),
               .k = config.in_features,
               .layout = {.codes = Codes::kOther,
                          .other_block_bytes = kCodeBytes + 4 * kPackedRows,
                          .decode = decode},
               .gated = config.gated};
  }

  PackedWeight weight() const override { return weight_; }
  int64_t num_bytes() const override { return weight_.n * (weight_.k + 4); }

  void list(WeightTable& table, char* buffer, const std::string& prefix) const override {
    int64_t row = 0;
    for (const LinearPart& part : parts_) {
      table.add(prefix + part.name + ".weight", codes(buffer).rows(row, part.out_features));
      table.add(prefix + part.name + ".weight_scale", scales(buffer).rows(row, part.out_features));
      row += part.out_features;
    }
  }

  void pack(const Context&, const PackedWeight& w, char* buffer) const override {
    std::memset(w.blocks, 0, static_cast<size_t>(w.num_bytes()));
    for (int64_t row = 0; row < w.n; ++row) {
      const int64_t source = w.gated ? gated_row(w.n, row) : row, in_block = row % kPackedRows;
      for (int64_t k = 0; k < w.k; k += kPackedK) {
        char* block = static_cast<char*>(w.blocks) +
                      (row / kPackedRows * w.k_blocks() + k / kPackedK) * w.block_bytes();
        std::memcpy(block + in_block * kPackedK, codes(buffer).as<char>() + source * w.k + k,
                    static_cast<size_t>(std::min<int64_t>(kPackedK, w.k - k)));
        reinterpret_cast<float*>(block + kCodeBytes)[in_block] = scales(buffer).as<float>()[source];
      }
    }
  }

 private:
  // Scales first, so that they are aligned.
  Tensor scales(char* buffer) const { return {buffer, DType::kF32, {weight_.n}}; }
  Tensor codes(char* buffer) const {
    return {buffer + 4 * weight_.n, DType::kI8, {weight_.n, weight_.k}};
  }

  std::vector<LinearPart> parts_;
  PackedWeight weight_;
};

REGISTER_LAYOUT("test_int8_row", Int8RowTensors);

}  // namespace
