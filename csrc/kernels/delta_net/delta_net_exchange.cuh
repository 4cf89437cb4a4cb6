// The exchange between the CTAs of a head in gated_delta_net.cu. They send each other q and k of a
// step's tokens, and sums of squares of o. Sent bytes count on the receiver's barrier, so only
// receivers wait.
#pragma once

#include "core/ptx.cuh"
#include "kernels/delta_net/delta_net_memory.cuh"

namespace cpmcu::cuda::delta_net {

template <typename Memory>
struct Exchange {
  static constexpr int kSplit = Memory::kSplit;
  // Sums of squares of a token: kOwn of kParts are of this CTA.
  static constexpr int kParts = Memory::kParts, kOwn = kParts / kSplit;
  static constexpr int kPartLanes = kDim / 4 / kParts;

  Memory& shared;
  int part, lane;

  explicit __device__ __forceinline__ Exchange(Memory& shared)
      : shared(shared), part(blockIdx.x % kSplit), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ uint32_t barrier(int round) const {
    return ptx::shared_address(shared.barriers + round);
  }
  __device__ __forceinline__ void init_barriers() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      if (threadIdx.x != 0) return;
      for (int i = 0; i < kExchanges; ++i) ptx::mbarrier_init(barrier(i), 1);
      ptx::mbarrier_init_fence();
    }
#endif
  }
  // Waits until all CTAs of the head have initialised their barriers and read their common inputs
  // from global memory: the window and the pending tokens. NOTE: it does not publish writes.
  static __device__ __forceinline__ void meet() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
#endif
  }
  __device__ __forceinline__ void wait(int round, int parity) const {
    ptx::mbarrier_wait(barrier(round), parity);
  }

  // One thread calls it. `tokens`: the number of tokens whose q and k other CTAs send.
  __device__ __forceinline__ void expect_keys(int tokens) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    ptx::mbarrier_expect_bytes(barrier(kExchangeOfKeys), tokens * 2 * kKeyFloats * sizeof(float));
#endif
  }
  // Sends `keys`, q and k of a token that the warp has prepared, to the other CTAs.
  __device__ __forceinline__ void send_keys(const float* keys) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    __syncwarp();
#pragma unroll
    for (int begin = 0; begin < 2 * kKeyFloats; begin += 4 * 32) {
      const float* const from = keys + begin + 4 * lane;
      if (begin + 4 * lane >= 2 * kKeyFloats) break;
      const float4 x = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int i = 1; i < kSplit; ++i) {
        const int to = (part + i) % kSplit;
        ptx::store_cluster16(ptx::cluster_address(ptx::shared_address(from), to),
                             {x.x, x.y, x.z, x.w},
                             ptx::cluster_address(barrier(kExchangeOfKeys), to));
      }
    }
#endif
  }

  // The sum of squares of part `p` of a token's o.
  __device__ __forceinline__ float* squares(int p, int place) const {
    return shared.squares + (p / kOwn * shared.num_squares + place) * kOwn + p % kOwn;
  }
  // One thread calls it. `tokens`: the number of tokens of the round, a multiple of 4.
  __device__ __forceinline__ void expect_squares(int round, int tokens) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      ptx::mbarrier_expect_bytes(barrier(round), kParts * tokens * sizeof(float));
    }
#endif
  }
  // Sends the warp's sums of squares to each CTA of the head. kPartLanes neighbouring lanes have
  // the same `sum`. `place`: of the warp's first token.
  __device__ __forceinline__ void send_squares(int round, float sum, int place) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    static_assert(kPartLanes == 8, "a warp sends 16 bytes");
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __shfl_sync(0xffffffffu, sum, i * kPartLanes);
    if (lane >= kSplit) return;
    const uint32_t to = ptx::shared_address(squares(part * kOwn, place));
    ptx::store_cluster16(ptx::cluster_address(to, lane), sums,
                         ptx::cluster_address(barrier(round), lane));
#endif
  }
};

}  // namespace cpmcu::cuda::delta_net
