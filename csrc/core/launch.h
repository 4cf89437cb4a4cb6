// Launches a CUDA kernel, with programmatic dependent launch (PDL) if the device has it.
//
// Contract: every thread of each kernel calls pdl_wait() (core/ptx.cuh) unconditionally. It does so
// before it accesses memory that an earlier kernel wrote or may still read. The kernel calls
// pdl_launch() as early as it can.
//
// Memory that a kernel may read before pdl_wait():
//   weights                                          no kernel writes them during a step
//   positions, slots, lengths, masks, page tables    complete before the forward pass
//   KV entries of earlier passes                     complete before the forward pass
// The last two hold because the first kernel of a pass, `embedding`, calls pdl_wait() before
// pdl_launch().
#pragma once

#ifdef CPMCU_WITH_CUDA
#include <cuda_runtime.h>

#include "core/context.h"

namespace cpmcu {

// `cluster`: CTAs of a thread block cluster in each direction (compute capability 9.0 and up).
template <typename... Params, typename... Args>
void launch_cluster(const Context& ctx, dim3 cluster, void (*kernel)(Params...), dim3 grid,
                    dim3 block, size_t shared_bytes, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = cluster.x, .y = cluster.y, .z = cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream);
  config.attrs = attributes;
  config.numAttrs = ctx.code_capability < 90 ? 0 : cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

template <typename... Params, typename... Args>
void launch(const Context& ctx, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, const Args&... args) {
  launch_cluster(ctx, dim3(1), kernel, grid, block, shared_bytes, args...);
}

// Dynamic shared memory above 48 KiB must be enabled once for each kernel and device. The carve-out
// is set to the maximum, so a small kernel can run on the same SM at the same time.
template <typename Kernel>
void allow_shared_bytes(Kernel kernel, size_t bytes) {
  if (bytes > 48 * 1024) {
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared));
  }
}

}  // namespace cpmcu
#endif
