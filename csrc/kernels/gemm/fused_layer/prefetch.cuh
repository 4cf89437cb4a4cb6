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

// The producer adds it to num_loaded when no more prefetches are needed.
constexpr int kNoMoreLoads = 1 << 20;

// By one warp. `num_loaded`: weight blocks that the producer has requested so far.
template <typename Mainloop>
__device__ __forceinline__ void prefetch_weights(const FusedLayerArgs& args, int* num_loaded) {
  const int lane = threadIdx.x % 32;
  // `number`: block index over both launches. `left`: blocks of the next launch that may still be
  // prefetched.
  int number = 0, left = Mainloop::kPrefetchBlocks;
  bool is_finished = false;
  long long before = clock64();
#pragma unroll 1
  for (int i = 0; i < args.num_parts + args.num_following; ++i) {
    const bool follows = i >= args.num_parts;
    const WeightBlocks& of = follows ? args.following[i - args.num_parts] : args.parts[i];
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

// Cycles between two L2 prefetches of a CTA; 0: no prefetch. A rate 5 % above the peak keeps memory
// busy. There is no prefetch in four cases:
//   * More than one row: the main loop is the bottleneck, and prefetches delay other loads.
//   * No weights follow: prefetches cost 0.7 us a layer.
//   * The blocks ahead would take more than half of L2.
//   * A layer's KV entries take more than a fifth of L2: prefetches cost 2 us a layer at 16384
//     entries of 2 heads.
inline int prefetch_cycles_of(const Context& ctx, const FusedLayerParams& p) {
  const AttentionParams& attention = p.attention;
  const int64_t entries = attention.window > 0 ? std::min(attention.window, attention.tokens.max_kv)
                                               : attention.tokens.max_kv;
  const int64_t kv_bytes = int64_t{4} * entries * attention.num_kv_heads * attention.head_dim;
  const FusedGemm& first = p.gemms.front();
  const int64_t bytes_ahead =
      first.packed.block_bytes() * prefetch_blocks_of(first.packed.layout.bits()) * ctx.sm_count;
  if (first.x.size(0) != 1 || first.is_dense() || p.following.empty() || ctx.bytes_per_cycle == 0 ||
      bytes_ahead > ctx.l2_bytes / 2 || kv_bytes > ctx.l2_bytes / 5) {
    return 0;
  }
  return static_cast<int>(0.95 * static_cast<double>(first.packed.block_bytes()) * ctx.sm_count /
                          ctx.bytes_per_cycle);
}

}  // namespace cpmcu::cuda::fused
