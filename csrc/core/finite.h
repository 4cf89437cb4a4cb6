// Finds NaN and infinities: in host memory at cache bandwidth, on a device at memory bandwidth.
#pragma once

#include <cstdint>
#include <vector>

#include "core/context.h"
#include "core/dtype.h"

namespace cpmcu {

// The index of the first of `count` numbers that is NaN or infinite. -1 if all are finite or the
// dtype is not floating.
int64_t find_not_finite(DType dtype, const void* numbers, int64_t count);

// Numbers in device memory.
struct DeviceNumbers {
  DType dtype = DType::kF32;
  const void* data = nullptr;
  int64_t count = 0;
};
// The index of the first number that is not finite, for each of several tensors on a CUDA device.
// Waits for the device once.
std::vector<int64_t> find_not_finite_on_device(const Context& ctx,
                                               const std::vector<DeviceNumbers>& tensors);

}  // namespace cpmcu
