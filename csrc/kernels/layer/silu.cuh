// The activation of silu_mul.h, for kernels that do it: the same bits in all of them.
#pragma once

#include <cuda_runtime.h>

namespace cpmcu::cuda {

// By the units that approximate, with a relative error of about (4 + |a|) 2^-23. An epilogue has
// it for each output, and its time is that of fetching its instructions: 20 of an IEEE division, 8
// of expf.
__device__ __forceinline__ float silu(float a) { return __fdividef(a, 1.0f + __expf(-a)); }

}  // namespace cpmcu::cuda
