// A view of memory: pointer, element type and up to four dimensions, always contiguous.
//
// It is type-erased, so layers, model and engine are plain C++ and only kernels are templates. It
// owns no memory; the arena does (core/arena.h).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/check.h"
#include "core/dtype.h"

namespace cpmcu {

class Tensor {
 public:
  static constexpr int kMaxDims = 4;

  Tensor() = default;
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape)
      : data_(data), dtype_(dtype), num_dims_(static_cast<int>(shape.size())) {
    CHECK_STATE(num_dims_ <= kMaxDims, "a tensor has {} dimensions, expected at most 4", num_dims_);
    int i = 0;
    for (int64_t size : shape) shape_[i++] = size;
  }

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  int num_dims() const { return num_dims_; }
  int64_t size(int dim) const { return shape_[dim < 0 ? num_dims_ + dim : dim]; }
  bool empty() const { return data_ == nullptr; }

  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < num_dims_; ++i) n *= shape_[i];
    return n;
  }
  int64_t num_bytes() const { return num_elements() * size_of(dtype_); }

  // Rows [begin, begin + count) of the first dimension.
  Tensor rows(int64_t begin, int64_t count) const {
    CHECK_STATE(num_dims_ > 0 && begin >= 0 && count >= 0 && begin + count <= shape_[0],
                "rows [{}, {}) of a tensor {}", begin, begin + count, shape_text());
    Tensor out = *this;
    const int64_t row_bytes = shape_[0] == 0 ? 0 : num_bytes() / shape_[0];
    out.data_ = static_cast<char*>(data_) + begin * row_bytes;
    out.shape_[0] = count;
    return out;
  }
  // The same elements under another shape.
  Tensor view(std::initializer_list<int64_t> shape) const {
    Tensor out(data_, dtype_, shape);
    CHECK_STATE(out.num_elements() == num_elements(), "view {} of a tensor {}", out.shape_text(),
                shape_text());
    return out;
  }

  std::string shape_text() const {
    std::string text = "[";
    for (int i = 0; i < num_dims_; ++i) text += (i ? ", " : "") + std::to_string(shape_[i]);
    return text + "]";
  }

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  int num_dims_ = 0;
  std::array<int64_t, kMaxDims> shape_{};
};

}  // namespace cpmcu
