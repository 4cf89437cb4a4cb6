// The activation of silu_mul.h. All kernels that use it produce the same bits.
#pragma once

#include <cuda_runtime.h>

namespace cpmcu::cuda {

// Uses the approximate exp and division. Relative error: about (4 + |a|) 2^-23. In an epilogue, the
// cost is the fetch of instructions: an IEEE division would add 20, expf 8.
__device__ __forceinline__ float silu(float a) { return __fdividef(a, 1.0f + __expf(-a)); }

}  // namespace cpmcu::cuda
