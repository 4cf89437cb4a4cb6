// The activation kClampedSwiglu of gated_activation.h. All kernels that use it produce the same
// bits.
#pragma once

#include <cuda_runtime.h>

namespace cpmcu::cuda {

__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit) {
  const float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
  return __fdividef(g, 1.0f + __expf(-alpha * g)) * (u + 1.0f);
}

}  // namespace cpmcu::cuda
