// Prefetch of weights to L2, ahead of the pipeline in shared memory.
//
// While the pipeline is full, memory would be idle: 6 of 51 us between down and the next layer's
// gate_up. One warp prefetches Mainloop::kPrefetchBlocks weight blocks beyond the last one that the
// producer requested, including the first blocks of the next launch.
//
// The surprising decision: the prefetch rate is slightly above the bandwidth of memory.
//
//   prefetch rate        us a layer, one row
//   none                 51.3
//   20 % lower           51.9   the pipeline catches up, and blocks are read twice at once
//   as built             49.5
//   12 % higher          53.0   partial sums, counters and x queue behind prefetches
#pragma once

#include "kernels/gemm/fused_layer/ring.cuh"

namespace cpmcu::cuda::fused {

constexpr int kNoMoreLoads = 1 << 20;  // added to num_loaded when no more prefetches are needed

// By one warp. `num_loaded`: weight blocks that the producer has requested so far.
template <typename Mainloop>
__device__ __forceinline__ void prefetch_weights(const FusedLayerArgs& args, int* num_loaded) {
  const int lane = threadIdx.x % 32;
  // `number`: block index over both launches. `left`: blocks left of the next launch.
  int number = 0, left = Mainloop::kPrefetchBlocks;
  bool is_finished = false;
  long long before = clock64();
#pragma unroll 1
  for (int i = 0; i < args.num_gemms + args.num_following; ++i) {
    const bool follows = i >= args.num_gemms;
    const WeightBlocks& of = follows ? args.following[i - args.num_gemms] : args.gemms[i];
    each_block(of, [&](int tile, int k_block) {
      if (is_finished || (follows && --left < 0)) return;
      if (number++ < Mainloop::kPrefetchBlocks) return;  // the pipeline requests these itself
      int loaded;
      const auto read = [&] {
        loaded = __shfl_sync(0xffffffffu, lane == 0 ? atomicAdd(num_loaded, 0) : 0, 0);
      };
      for (read(); number > loaded + Mainloop::kPrefetchBlocks; read()) __nanosleep(40);
      is_finished = loaded >= kNoMoreLoads;
      if (number <= loaded) return;
      while (clock64() - before < args.prefetch_cycles) __nanosleep(20);
      before = clock64();
      const char* from = of.blocks + (int64_t{tile} * of.k_blocks + k_block) * of.block_bytes;
#pragma unroll 1
      for (int byte = lane * 128; byte < of.block_bytes; byte += 32 * 128) {
        ptx::prefetch_l2(from + byte);
      }
    });
  }
}

}  // namespace cpmcu::cuda::fused
