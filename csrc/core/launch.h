// How every CUDA kernel is launched: with programmatic dependent launch where the device has it.
//
// Contract: each kernel calls pdl_wait() (core/ptx.cuh), in every thread and unconditionally,
// before it touches anything that an earlier kernel wrote or may still read, and pdl_launch()
// as early as it can. Weights may be read before pdl_wait(): nothing writes them during a step.
// Each forward pass begins with `embedding`, which launches only after it has waited. So what
// follows it may also read before pdl_wait() what was complete before the pass: positions, slots,
// lengths, masks and page tables of its rows, and entries of the cache that are not of this pass.
#pragma once

#ifdef CPMCU_WITH_CUDA
#include <cuda_runtime.h>

#include "core/context.h"

namespace cpmcu {

// `cluster`: this many neighbouring blocks run together and see each other's shared memory (for
// code of compute capability 9.0 and up).
template <typename... Params, typename... Args>
void launch_cluster(const Context& ctx, int cluster, void (*kernel)(Params...), dim3 grid,
                    dim3 block, size_t shared_bytes, const Args&... args) {
  if (ctx.pending != nullptr) ctx.pending->flush();
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = static_cast<unsigned>(cluster), .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream);
  config.attrs = attributes;
  config.numAttrs = ctx.code_capability < 90 ? 0 : cluster > 1 ? 2 : 1;
  CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

template <typename... Params, typename... Args>
void launch(const Context& ctx, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, const Args&... args) {
  launch_cluster(ctx, 1, kernel, grid, block, shared_bytes, args...);
}

// Dynamic shared memory above 48 KiB has to be asked for, once per kernel and device. What is left
// of a multiprocessor's is to be shared memory, too, not L1: a small kernel may find room in it.
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
