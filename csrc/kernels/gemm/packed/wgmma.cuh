// Multiplication policy with wgmma (Hopper).
//
// wgmma reads rows of x from shared memory, all columns in one instruction. So a warp spends its
// issue slots on unpacking alone, and 64 rows cost hardly more than one. W, unpacked in registers,
// is the left operand.
#pragma once

#include "kernels/gemm/packed/multiply.cuh"

namespace cpmcu::cuda {
namespace {

// kTilesAtOnce: m16 tiles of a warp at a time, 1 or 2. One tile halves the registers for a block's
// sums.
template <int kTilesAtOnce>
struct WgmmaOf {
  static constexpr bool kTensorMap = true;
  static constexpr int kTiles = kTilesAtOnce;

  template <int kGroups>
  struct LaneRows {};  // wgmma reads rows of x itself

  // part = fragments of 128 k times rows of x. unpack_to(a, pair, step, i) makes the fragment of
  // m16 tile i and of k step `step` (0 or 1) of pair `pair`. One or two k steps (kSteps) are
  // multiplied at a time. `part` holds the sums of a group of kScaleSteps k steps; `next_group` is
  // called after each group but the last. Calls `meanwhile` when all wgmma are issued.
  template <typename Unpacker, typename T, int kGroups, int kMostSteps = 2, typename Unpack,
            typename N, typename F>
  static __device__ __forceinline__ void multiply_fragments(float (&part)[kTiles][kGroups][4],
                                                            XSums<Unpacker, T, kGroups>& x_sums,
                                                            uint32_t rows, Unpack unpack_to,
                                                            N next_group, F meanwhile) {
    constexpr int kScaleSteps = Unpacker::kScaleSteps;
    constexpr int kSteps = kScaleSteps < kMostSteps ? kScaleSteps : kMostSteps;
    static_assert(kScaleSteps % kSteps == 0);
    [[maybe_unused]] uint32_t ones[4];
    if constexpr (kHasMinimum<Unpacker>) x_sums.make_ones(ones);
    const uint64_t descriptor = ptx::wgmma_descriptor_swizzle128(rows);
    // A step is unpacked while the previous one is multiplied.
    uint32_t a[2][kSteps][kTiles][4];
#pragma unroll
    for (int first = 0; first < 8; first += kSteps) {
      auto& fragments = a[first / kSteps % 2];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          unpack_to(fragments[step][i], (first + step) / 2, (first + step) % 2, i);
        }
      }
      // 16 k are 32 bytes; descriptors count 16.
      const uint64_t x = descriptor + first / 4 * (8 * kGroups * 128 / 16) + first % 4 * 2;
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ptx::wgmma_64xNx16<T, kGroups>(part[i], fragments[step][i], x + step * 2,
                                         (first + step) % kScaleSteps > 0);
        }
        if constexpr (kHasMinimum<Unpacker>) {
          ptx::wgmma_64xNx16<T, kGroups>(x_sums.of, ones, x + step * 2,
                                         (first + step) % kScaleSteps > 0);
        }
      }
      ptx::wgmma_commit();
      const int done = first + kSteps;
      if (done < 8 && done % kScaleSteps == 0) {
        ptx::wgmma_wait<0>();
        next_group(done / kScaleSteps);
      } else if (done < 8) {
        ptx::wgmma_wait<1>();
      }
    }
    meanwhile();
    ptx::wgmma_wait<0>();
  }

  // Multiplies the warp's m16 tiles from first_tile on. Calls `meanwhile` when all wgmma are
  // issued.
  template <typename Unpacker, typename T, int kGroups, typename N, typename F>
  static __device__ __forceinline__ void multiply(
      float (&part)[kTiles][kGroups][4], XSums<Unpacker, T, kGroups>& x_sums, int first_tile,
      uint32_t weights, uint32_t rows, const LaneRows<kGroups>&,
      const typename Unpacker::template Tile<T> (&tiles)[2], N next_group, F meanwhile) {
    CodePair<Unpacker> codes[4];
    const auto load = [&](int pair) { codes[pair].load(weights + pair * kPairBytes<Unpacker>); };
    constexpr bool kLean = kGroups == 16;  // few registers are left beside the sums
    constexpr int kAhead = kLean ? 1 : kGroups == 8 && Unpacker::kBits == 8 ? 2 : 4;
#pragma unroll
    for (int pair = 0; pair < kAhead; ++pair) load(pair);
    multiply_fragments<Unpacker, T, kGroups, kLean ? 1 : 2>(
        part, x_sums, rows,
        [&](uint32_t (&a)[4], int pair, int step, int i) {
          const int t = first_tile + i;
          Unpacker::template unpack<T>(a, codes[pair].at(step, t), tiles[t], 2 * pair + step);
          if (step == 1 && i == kTiles - 1 && pair + kAhead < 4) load(pair + kAhead);
        },
        next_group, meanwhile);
  }
};

}  // namespace
}  // namespace cpmcu::cuda
