// The tensors of a checkpoint that make up one 4-bit matrix (GPTQ, AWQ, compressed-tensors,
// CPM.cu's Marlin files): their names, shapes and places in a buffer, and their repacking. Options:
// "format" (W4Format), "group_size" (128 or -1), "zero_points", "bfloat16_scales", and "fused" (the
// parts are one tensor under the stacked name).
#pragma once

#include <string>
#include <vector>

#include "kernels/gemm/w4a16.h"
#include "linear/linear.h"

namespace cpmcu {

class W4Tensors {
 public:
  explicit W4Tensors(const LinearConfig& config);

  // The matrix in weight blocks, without memory.
  W4Weight weight() const { return weight_; }
  int64_t num_bytes() const { return num_bytes_; }
  // Lists the tensors at their places in `buffer`. `prefix` precedes the names.
  void list(WeightTable& table, char* buffer, const std::string& prefix = "") const;
  // Packs the tensors in `buffer` into `weight`.
  void pack(const Context& ctx, const W4Weight& weight, char* buffer) const;

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
    return view(buffer + part.scales_at, weight_.scale_dtype, part.scales_shape);
  }
  static Tensor zeros_of(const Part& part, char* buffer) {
    return view(buffer + part.zeros_at, DType::kI32, part.zeros_shape);
  }

  W4Format format_;
  bool by_row_;  // the tensors are [N, ...]
  W4Weight weight_;
  std::vector<Part> parts_;
  int64_t num_bytes_ = 0;
};

}  // namespace cpmcu
