// y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y with W in 4 bits (w4a16.h), 1 to 64 rows.
//
// Roofline: W is read once, N K / 2 bytes and 3 % of scales; at 3 TB/s 4096 x 4096 takes 2.9 us and
// 32768 x 4096 takes 23 us. The products hide behind that stream up to M = 32, and at M = 64 take
// as long as it does.
//
// The surprising decision: scales never touch the weights. q - 8 is exact in 16 bits, so the tensor
// cores add up exact integers times x for the 128 k of a group, and one float32 product per sum and
// group applies the scale. That is cheaper than scaling every weight, and no weight is rounded.
//
// Work: a block of threads owns 256 rows of W and a slice of K; each of eight warps multiplies 32
// rows, and one more feeds a ring in shared memory: a packed block (16.9 KB, contiguous) is one
// bulk copy, the rows of x come by a tensor map or, before Hopper, by cp.async. (Eight warps that
// took turns to feed lost 10 % from 16 rows on: while one does, the others of its warpgroup wait.)
// Weights do not depend on earlier kernels, so they are on their way before those end, as many as x
// does not have to wait behind; of up to 16 rows launches overlap for it. Where there are too few
// tiles of 256 rows for the chip, K is cut into slices, which a cluster adds up in order: a block
// sends the sums of 16 rows to the block that owns them, as asynchronous stores that count on a
// barrier there (before compute capability 9.0 and from 12.0 on: through global memory, with a
// second kernel). Slices depend on N and K only and the rows of x are columns of the products, so a
// row of y has the same bits whatever else is in the batch.
#pragma once

#include <climits>

#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/w4a16_ring.cuh"

namespace cpmcu::cuda {
namespace {

// ---- kernels

// Sums of 64 rows want more registers than an equal share.
template <typename Mma, int kGroups>
constexpr bool kMovesRegisters = Mma::kTensorMap && kGroups == 8;
template <typename Mma, int kGroups>
constexpr int kAllThreads = kThreads + (kMovesRegisters<Mma, kGroups> ? 128 : 32);

// Launches of up to 16 rows that cut K into slices overlap: while the blocks of one multiply what
// is left and add up their slices, those of the next fill their rings. So a multiprocessor has room
// for two blocks, but never for two of one launch, for which all others would wait: launches take
// turns to have more than half of the shared memory, or of the registers, by warps that do nothing
// (up to kMaxThreads, enough from 49 registers a thread on). Sums of more rows leave no registers
// for another block.
template <int kGroups>
constexpr bool kOverlaps = kGroups <= 2;
constexpr int kMoreShared = 116 * 1024, kLessShared = 108 * 1024;  // both fit into 228 KB
template <typename Mma, int kGroups>
constexpr int kMaxThreads = kOverlaps<kGroups> ? 640 : kAllThreads<Mma, kGroups>;

template <typename Mma, typename T,  // __half or __nv_bfloat16
          int kGroups,               // groups of 8 rows of x: M <= 8 * kGroups
          bool kZeros>               // W has zero points
__global__ void __launch_bounds__(kMaxThreads<Mma, kGroups>, 1)
    w4_gemm_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  using Ring = W4Ring<kGroups>;
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers + 1];
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  const Ring ring(shared, barriers, args.stages);
  const int slice = blockIdx.x;
#ifdef CPMCU_W4_CLUSTERS
  const Inbox<T, kGroups> inbox{ring.stage(args.stages).rows, ring.barriers + 8 * Ring::kBarriers,
                                slice, lane};
#endif
  const int first_tile = blockIdx.y, tile_step = gridDim.y;
  const int first_block = slice * args.slice_blocks + min(slice, args.longer_slices);
  const int blocks_of_tile = args.slice_blocks + (slice < args.longer_slices);

  const auto init = [&](int i) {
    // One arrival announces the bytes of bulk copies, the others are lanes that copy rows.
    const auto mine = ring.stage(i);
    ptx::mbarrier_init(mine.full, Mma::kTensorMap ? 1 : 33);
    ptx::mbarrier_init(mine.empty(), kWarps * kArrivals<kGroups>);
  };
  // Each barrier takes a warp 30 to 40 cycles, so all warps share them. Not of up to 8 rows, whose
  // blocks begin early enough: the sooner they ask, the more they are in the way of the launch
  // before.
  if constexpr (kGroups == 1) {
    if (threadIdx.x < args.stages) {
      init(threadIdx.x);
      ptx::mbarrier_init_fence();
    }
  } else if (ptx::is_elected()) {
#pragma unroll 1
    for (int i = warp; i < args.stages; i += blockDim.x / 32) init(i);
    ptx::mbarrier_init_fence();
  }
#ifdef CPMCU_W4_CLUSTERS
  if (args.slices > 1 && threadIdx.x == kThreads - 1) inbox.open(args);
#endif
  __syncthreads();
#ifdef CPMCU_W4_CLUSTERS
  if (args.slices > 1) ptx::cluster_arrive();
#endif

  if (warp >= kWarps) {
    if constexpr (kMovesRegisters<Mma, kGroups>) ptx::give_registers<kFeedingRegisters>();
    if (warp == kWarps) {
      feed<Mma>(args, ring, first_tile, tile_step, first_block, blocks_of_tile);
    } else {
      ptx::pdl_wait();
    }
#ifdef CPMCU_W4_CLUSTERS
    if (args.slices > 1) ptx::cluster_wait();
#endif
    return;
  }
  if constexpr (kMovesRegisters<Mma, kGroups>) ptx::take_registers<kMultiplyingRegisters>();
  ptx::pdl_wait();

  const typename Mma::template LaneRows<kGroups> lane_rows;
  const LaneWeights lane_weights;
  auto stage = ring.stage(0);
  for (int tile = first_tile; tile < args.tiles; tile += tile_step) {
    float sums[2][kGroups][4] = {};
    ptx::mbarrier_wait(stage.full, stage.parity);
    for (int left = blocks_of_tile;;) {
      const auto current = stage;
      ring.advance(stage);
      bool is_full;
      const auto ask = [&] {
        is_full = ptx::mbarrier_try_wait(stage.full, stage.parity, left > 1);
      };
      const auto release = [&] { arrive<kGroups>(current.empty()); };
      add_block<Mma, T, kGroups, kZeros>(sums, current.rows, current.weights(), lane_rows,
                                         lane_weights, args.bf16_scales, ask, release);
      if (--left == 0) break;
      ptx::mbarrier_wait(stage.full, stage.parity, is_full);
    }

    const int n0 = tile * kW4BlockRows;
    if (args.slices == 1) {
      store_sums<T>(args, sums, n0);
      continue;
    }
#ifdef CPMCU_W4_CLUSTERS
    inbox.add_up(args, sums, warp, n0);
#else
    store_partials(args, sums, slice, n0 + warp * 32 + lane / 4);
#endif
  }
}

// Adds up the slices where there are no clusters.
template <typename T>
__global__ void __launch_bounds__(256) w4_add_slices_kernel(const __grid_constant__ Args args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  const int n = i / 8 * 16 + i % 8;
  if (n >= args.n) return;
  float sum = 0, sum_8 = 0;
  for (int slice = 0; slice < args.slices; ++slice) {
    const float* from = args.partials + (int64_t{slice} * args.m + row) * args.n + n;
    sum += from[0];
    if (n + 8 < args.n) sum_8 += from[8];
  }
  store_pair<T>(args, row, n, sum, sum_8);
}

// ---- launchers

// Whether this launch has more registers, not more shared memory: every second of a context's.
bool takes_registers(const Context& ctx) {
  return ctx.overlapping_launches != nullptr && (*ctx.overlapping_launches)++ % 2 == 1;
}

// How many threads make a block take more than half of a multiprocessor's registers and leave
// enough for one of `threads`; if none do, more than a block may have.
template <typename Kernel>
int threads_of_most_registers(Kernel kernel, int threads) {
  constexpr int kRegisters = 64 * 1024;
  cudaFuncAttributes of{};
  CHECK_CUDA(cudaFuncGetAttributes(&of, kernel));
  const int of_warp = (of.numRegs + 7) / 8 * 8 * 32;
  const int warps = kRegisters / 2 / of_warp + 1;
  return (warps + threads / 32) * of_warp <= kRegisters ? 32 * warps : INT_MAX;
}

template <typename Mma, typename T, int kGroups, bool kZeros>
void launch_w4_kernel(const Context& ctx, Args args) {
  constexpr int kStageBytes = W4Ring<kGroups>::kStageBytes;
  const auto kernel = w4_gemm_kernel<Mma, T, kGroups, kZeros>;
  const bool clusters = has_clusters(ctx.code_capability);
  args.alpha /= kUnpackedScale<T>;
  args.slice_blocks = args.k_blocks / args.slices;
  args.longer_slices = args.k_blocks % args.slices;
  for (int i = 0; i <= args.slices; ++i) {
    args.first_part[i] = static_cast<uint8_t>((kParts * i + args.slices - 1) / args.slices);
  }
  const bool sends = clusters && args.slices > 1;
  const int parts = (kParts + args.slices - 1) / args.slices;  // at most
  const int inbox_bytes = sends ? args.slices * parts * kGroups * kGroupBytes : 0;
  // One block takes nearly all of a multiprocessor's shared memory; GeForce cards have 99 KB for
  // one.
  int threads = kAllThreads<Mma, kGroups>, shared_bytes = clusters ? kRingBytes : 98 * 1024;
  allow_shared_bytes(kernel, shared_bytes);
  if constexpr (kOverlaps<kGroups>) {
    static const int more_threads = threads_of_most_registers(kernel, threads);
    if (sends && more_threads <= kMaxThreads<Mma, kGroups>) {
      const bool more = takes_registers(ctx);
      if (more) threads = more_threads;
      shared_bytes = more ? kLessShared : kMoreShared;
    }
  }
  args.stages = std::min(kMaxStages, (shared_bytes - inbox_bytes) / kStageBytes);
  // The more rows, the longer x takes and the less should be in front of it. Where K is not cut
  // there is more to read than to wait for, up to 32 rows.
  args.asked = args.stages;
  args.ahead = 0;
  if (sends) {
    if (kGroups > 1) args.asked = kGroups == 2 ? 3 : 1;
    args.ahead = kGroups == 2 ? 2 : 1;
  } else if (clusters && kGroups == 8) {
    args.asked = 2;
  }
  args.rounds = args.slices > 1 ? 1 : (args.tiles + ctx.sm_count - 1) / ctx.sm_count;
  const int tile_blocks = (args.tiles + args.rounds - 1) / args.rounds;
  launch_cluster(ctx, clusters ? args.slices : 1, kernel, dim3(args.slices, tile_blocks),
                 dim3(threads), shared_bytes, args);
  if (args.slices > 1 && !clusters) {
    launch(ctx, w4_add_slices_kernel<T>, dim3((args.n / 2 + 8 + 255) / 256, args.m), dim3(256), 0,
           args);
  }
}

template <typename Mma, typename T, int kGroups>
void launch_w4(const Context& ctx, const Args& args) {
  const bool zeros = args.block_bytes > kZeroOffset;
  zeros ? launch_w4_kernel<Mma, T, kGroups, true>(ctx, args)
        : launch_w4_kernel<Mma, T, kGroups, false>(ctx, args);
}

// MmaOf<kGroups>: how the kernel with room for so many groups of 8 rows multiplies.
template <template <int> typename MmaOf>
void launch_w4_rows(const Context& ctx, DType dtype, const Args& args) {
  dispatch_half(dtype, [&](auto t) {
    dispatch_int<1, 2, 4, 8>("groups of rows", row_groups(args.m), [&](auto groups) {
      constexpr int kGroups = decltype(groups)::value;
      launch_w4<MmaOf<kGroups>, decltype(t), kGroups>(ctx, args);
    });
  });
}

}  // namespace
}  // namespace cpmcu::cuda
