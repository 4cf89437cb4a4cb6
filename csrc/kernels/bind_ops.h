// Shared parts of the op bindings: a context, and device memory with a shape.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/device.h"
#include "core/tensor.h"
#ifdef CPMCU_WITH_CUDA
#include "kernels/gemm/cublaslt.h"
#endif

namespace cpmcu {

class OpsContext {
 public:
  OpsContext(const std::string& device, int index, const std::vector<std::string>& cublas_paths)
      : ctx(device_named(device, index)) {
#ifdef CPMCU_WITH_CUDA
    if (ctx.device.is_cuda()) cublas_ = CublasLt::load(ctx, cublas_paths);
    ctx.cublas = cublas_.get();
#else
    (void)cublas_paths;
#endif
  }

  void wait() const { synchronize(ctx.device, ctx.stream); }

  DeviceContext ctx;

 private:
#ifdef CPMCU_WITH_CUDA
  std::unique_ptr<CublasLt> cublas_;
#endif
};
using SharedContext = std::shared_ptr<OpsContext>;

// Device memory with a shape. `pinned`: host memory that the device can write.
class Array {
 public:
  Array(SharedContext context, const std::vector<int64_t>& shape, const std::string& dtype,
        bool pinned)
      : context_(std::move(context)), shape_(shape), dtype_(parse_dtype(dtype)), pinned_(pinned) {
    num_bytes_ = size_of(dtype_);
    for (int64_t size : shape_) {
      CHECK(size >= 0, "an array has a dimension of {}, expected 0 or more", size);
      num_bytes_ *= size;
    }
    const Device device = context_->ctx.device;
    data_ = pinned_ ? allocate_pinned(device, num_bytes_) : allocate(device, num_bytes_);
    if (num_bytes_ > 0) fill_bytes(device, data_, 0xFF, num_bytes_, context_->ctx.stream);
    context_->wait();
  }
  ~Array() {
    const Device device = context_->ctx.device;
    pinned_ ? release_pinned(device, data_) : release(device, data_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void copy_from(const pybind11::array& source) {
    CHECK(source.dtype().is(numpy_dtype()) || source.dtype().equal(numpy_dtype()),
          "the source is {}, expected {} like the array",
          std::string(pybind11::str(source.dtype())), name_of(dtype_));
    CHECK(source.nbytes() == num_bytes_, "the source has {} bytes, expected {} like the array",
          source.nbytes(), num_bytes_);
    CHECK(source.flags() & pybind11::array::c_style,
          "the source is not contiguous, expected a C-contiguous array");
    copy_to_device(context_->ctx.device, data_, source.data(), num_bytes_, context_->ctx.stream);
    context_->wait();
  }

  pybind11::array numpy() const {
    pybind11::array result(numpy_dtype(),
                           std::vector<pybind11::ssize_t>(shape_.begin(), shape_.end()));
    copy_to_host(context_->ctx.device, result.mutable_data(), data_, num_bytes_,
                 context_->ctx.stream);
    context_->wait();
    return result;
  }

  Tensor tensor() const {
    switch (shape_.size()) {
      case 1:
        return {data_, dtype_, {shape_[0]}};
      case 2:
        return {data_, dtype_, {shape_[0], shape_[1]}};
      case 3:
        return {data_, dtype_, {shape_[0], shape_[1], shape_[2]}};
      case 4:
        return {data_, dtype_, {shape_[0], shape_[1], shape_[2], shape_[3]}};
      default:
        break;
    }
    throw Error(ErrorKind::kInvalid,
                format_text("an array of an op has {} dimensions, expected 1 to 4", shape_.size()));
  }

  // The data as T*, for parameters that are not a Tensor.
  template <typename T>
  T* as(DType expected) const {
    CHECK(dtype_ == expected, "an array is {}, expected {}", name_of(dtype_), name_of(expected));
    return static_cast<T*>(data_);
  }
  template <typename T>
  T* as_structs() const {
    CHECK(dtype_ == DType::kU8 && num_bytes_ % sizeof(T) == 0,
          "an array is {} with {} bytes, expected uint8 and a multiple of {}", name_of(dtype_),
          num_bytes_, sizeof(T));
    return static_cast<T*>(data_);
  }

  const std::vector<int64_t>& shape() const { return shape_; }
  std::string dtype() const { return std::string(name_of(dtype_)); }

 private:
  pybind11::dtype numpy_dtype() const {
    return pybind11::dtype(dtype_ == DType::kBF16 ? "uint16" : std::string(name_of(dtype_)));
  }

  SharedContext context_;
  std::vector<int64_t> shape_;
  DType dtype_;
  bool pinned_;
  int64_t num_bytes_ = 0;
  void* data_ = nullptr;
};
using SharedArray = std::shared_ptr<Array>;

inline Tensor tensor_of(const SharedArray& array) { return array ? array->tensor() : Tensor(); }
// The data of an array, null if there is none. Bytes stand for a struct.
template <typename T>
T* pointer_to(const SharedArray& array) {
  if (!array) return nullptr;
  if constexpr (std::is_same_v<T, int>) {
    return array->as<int>(DType::kI32);
  } else if constexpr (std::is_same_v<T, float>) {
    return array->as<float>(DType::kF32);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    return array->as<uint64_t>(DType::kU64);
  } else {
    return array->as_structs<T>();
  }
}

// Parameters and the arrays that they point to.
template <typename Params>
struct OpsParams {
  Params params{};
  std::vector<SharedArray> arrays{};
};

void bind_delta_net_ops(pybind11::module_& ops);  // bind_delta_net_ops.cpp
void bind_family_ops(pybind11::module_& ops);     // bind_family_ops.cpp
void bind_moe_ops(pybind11::module_& ops);        // bind_moe_ops.cpp
void bind_sparse_ops(pybind11::module_& ops);     // bind_sparse_ops.cpp
void bind_tree_ops(pybind11::module_& ops);       // bind_tree_ops.cpp
void bind_block_ops(pybind11::module_& ops);      // bind_block_ops.cpp
void bind_packed_ops(pybind11::module_& ops);     // bind_packed_ops.cpp

}  // namespace cpmcu
