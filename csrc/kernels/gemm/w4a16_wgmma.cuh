// How Hopper multiplies packed blocks: wgmma, with the rows of x brought by tensor maps.
//
// wgmma reads the rows of x from shared memory by itself, for all columns in one instruction. So a
// warp spends its issue slots on unpacking alone, and 64 rows cost hardly more than one. W,
// unpacked in registers, is the left operand.
#pragma once

#include <cuda.h>

#include <cstring>

#include "kernels/gemm/w4a16_kernel.cuh"

namespace cpmcu::cuda {
namespace {

// kTilesAtOnce: of 16 rows a warp, 1 or 2 at a time. One takes half of the registers for sums of a
// block.
template <int kTilesAtOnce>
struct WgmmaOf {
  static constexpr bool kTensorMap = true;
  static constexpr int kTiles = kTilesAtOnce;

  template <int kGroups>
  struct LaneRows {};  // wgmma reads the rows by itself

  // Tiles first_tile, ... of the warp's.
  template <typename T, int kGroups>
  static __device__ __forceinline__ void multiply(float (&part)[kTiles][kGroups][4], int first_tile,
                                                  uint32_t weights, uint32_t rows,
                                                  const LaneRows<kGroups>&,
                                                  const uint32_t (&low)[2],
                                                  const uint32_t (&high)[2]) {
    // The same in all lanes, but the compiler has to be told: else it moves every descriptor to
    // uniform registers by itself.
    const uint64_t descriptor = ptx::wgmma_descriptor_swizzle128(__shfl_sync(0xffffffffu, rows, 0));
    uint4 words[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) words[pair] = ptx::load_shared16(weights + pair * 512);
    // The fragments of one pair of steps are unpacked while those of the pair before are
    // multiplied.
    uint32_t a[2][2][kTiles][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      auto& fragments = a[pair % 2];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int t = first_tile + i;
          unpack<T>(fragments[step][i], word_of(words[pair], step, t), low[t], high[t]);
        }
      }
      // 16 k are 32 bytes, in units of 16.
      const uint64_t x = descriptor + pair / 2 * (8 * kGroups * 128 / 16) + pair % 2 * 4;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ptx::wgmma_64xNx16<T, kGroups>(part[i], fragments[step][i], x + step * 2,
                                         pair + step > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
    }
    ptx::wgmma_wait<0>();
  }
};

// The map of rows [m, K] of which the copy engine brings 64 k of `box_rows` at a time.
inline TensorMap make_map(const void* x, int m, int k, DType dtype, int box_rows) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result));
    CHECK(result == cudaDriverEntryPointSuccess,
          "the CUDA driver has no cuTensorMapEncodeTiled, expected driver 12.0 or newer");
    return reinterpret_cast<Encode>(function);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[] = {2 * sizes[0]};  // bytes
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult status = encode(
      &map,
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
      const_cast<void*>(x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled fails with {} for rows [{}, {}]",
        static_cast<int>(status), m, k);
  TensorMap out;
  static_assert(sizeof(out) == sizeof(map));
  std::memcpy(&out, &map, sizeof(map));
  return out;
}

}  // namespace
}  // namespace cpmcu::cuda
