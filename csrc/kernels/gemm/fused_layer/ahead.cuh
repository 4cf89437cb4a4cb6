// Weights that come to L2 before the ring in shared memory has room for them.
//
// Memory would rest while a ring is full: from down to the next layer's gate and up 6 us of 51. A
// warp fetches Product::kAhead blocks further than the ring was fed, those of the launch behind
// this one, too. The pace is all: a little more than memory gives. Slower, and the ring catches up
// with it, so that blocks come twice at once; faster, and all that others wait for, sums, counters
// and x, stands in queues behind it (49.5 us a layer at one row; 51.3 without it, 51.9 and 53.0 at
// a pace 20 % slower and 12 % faster).
#pragma once

#include "kernels/gemm/fused_layer/ring.cuh"

namespace cpmcu::cuda::chain {

constexpr int kOver = 1 << 20;  // added to what was fed when nothing is needed any more

// By one warp. `num_fed`: blocks that the ring was fed with so far.
template <typename Product>
__device__ __forceinline__ void fetch_ahead(const FusedLayerArgs& args, int* num_fed) {
  const int lane = threadIdx.x % 32;
  int number = 0, left = Product::kAhead;  // blocks of this launch and the next; of the next alone
  bool is_over = false;
  long long before = clock64();
#pragma unroll 1
  for (int i = 0; i < args.num_gemms + args.num_following; ++i) {
    const bool follows = i >= args.num_gemms;
    const Blocks& of = follows ? args.following[i - args.num_gemms] : args.gemms[i];
    each_block(of, [&](int tile, int k_block) {
      if (is_over || (follows && --left < 0)) return;
      if (number++ < Product::kAhead) return;  // on its way: the ring holds more
      int fed;
      const auto read = [&] {
        fed = __shfl_sync(0xffffffffu, lane == 0 ? atomicAdd(num_fed, 0) : 0, 0);
      };
      for (read(); number > fed + Product::kAhead; read()) __nanosleep(40);
      is_over = fed >= kOver;
      if (number <= fed) return;
      while (clock64() - before < args.pace) __nanosleep(20);
      before = clock64();
      const char* from = of.blocks + (int64_t{tile} * of.k_blocks + k_block) * of.block_bytes;
#pragma unroll 1
      for (int byte = lane * 128; byte < of.block_bytes; byte += 32 * 128) {
        ptx::prefetch_l2(from + byte);
      }
    });
  }
}

}  // namespace cpmcu::cuda::chain
