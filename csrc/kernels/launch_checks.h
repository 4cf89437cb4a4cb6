// Checks of the tensors of vectorised kernels.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace cpmcu {

inline bool is_aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Requires a matrix of 16-bit elements whose rows are multiples of 16 bytes, aligned to 16 bytes.
inline void check_rows(std::string_view op, std::string_view name, const Tensor& tensor) {
  CHECK(tensor.num_dims() == 2 && tensor.size(1) > 0 && tensor.size(1) % 8 == 0,
        "{}: {} is {}, expected rows of a multiple of 8 elements", op, name, tensor.shape_text());
  CHECK(size_of(tensor.dtype()) == 2, "{}: {} is {}, expected float16 or bfloat16", op, name,
        name_of(tensor.dtype()));
  CHECK(is_aligned16(tensor.data()), "{}: {} is not aligned to 16 bytes", op, name);
}

// Requires a row stride of 0 (contiguous rows), or a multiple of 8 elements that is no less than a
// row.
inline void check_stride(std::string_view op, int64_t stride, int64_t width) {
  CHECK(stride == 0 || (stride >= width && stride % 8 == 0),
        "{}: rows have {} elements and a stride of {}, expected a multiple of 8 that is no less",
        op, width, stride);
}

// Requires a tensor of `count` elements of `dtype`, aligned to 16 bytes.
inline void check_vector(std::string_view op, std::string_view name, const Tensor& tensor,
                         DType dtype, int64_t count) {
  CHECK(tensor.dtype() == dtype && tensor.num_elements() == count,
        "{}: {} is {} {}, expected {} of {} elements", op, name, name_of(tensor.dtype()),
        tensor.shape_text(), name_of(dtype), count);
  CHECK(is_aligned16(tensor.data()), "{}: {} is not aligned to 16 bytes", op, name);
}

}  // namespace cpmcu
