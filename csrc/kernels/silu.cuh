// The activation of silu_mul.h, for kernels that do it: the same bits in all of them.
#pragma once

#include <cuda_runtime.h>

namespace cpmcu::cuda {

__device__ __forceinline__ float silu(float a) { return a / (1.0f + expf(-a)); }

}  // namespace cpmcu::cuda
