// y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y with W in weight blocks (packed.h), 1 to
// 64 rows.
//
// Roofline: W is read once. int4 has N K / 2 bytes and 3 % of scales: at 3 TB/s 4096 x 4096 takes
// 2.9 us and 32768 x 4096 takes 23 us. FP8 has twice the bytes and 0.4 to 3 % of scales. The mma
// work hides behind that stream up to M = 32; at M = 64 it takes as long.
//
// Schedule: a CTA owns 256 rows of W and a slice of K.
//   producer warp     weight blocks (int4: 16.9 KB, one bulk copy) -> stages, before x arrives;
//                     rows of x by TMA, or cp.async before Hopper, once earlier kernels are done
//   8 consumer warps  32 rows of W each: unpack exactly, mma over 128 k, scale in float32
//   slices of K       cluster: a CTA sends the sums of an m16 tile to its owner (st.async), and the
//                     owner adds them in order; without clusters: global memory, a second kernel
// Launches of up to 16 rows overlap (kOverlaps). Slices depend on N and K only, and an mma computes
// each row of x separately. So a row of y has the same bits for every M.
//
// The surprising decision: scales never touch the weights. Codes are exact in 16 bits, so the
// tensor cores sum codes * x over 128 k. One float32 multiply-add per sum and block applies the
// scale. That is cheaper than scaling every weight, and no weight is rounded.
#pragma once

#include <climits>

#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/packed/ring.cuh"

namespace cpmcu::cuda {
namespace {

// ---- kernels

// Sums of 64 rows need more than an equal share of registers.
template <typename Mma, int kGroups>
constexpr bool kMovesRegisters = Mma::kTensorMap && kGroups == 8;
template <typename Mma, int kGroups>
constexpr int kAllThreads = kThreads + (kMovesRegisters<Mma, kGroups> ? 128 : 32);

// Launches of up to 16 rows that cut K into slices overlap. While one launch multiplies its last
// blocks and adds its slices, the next one fills its stages. So an SM can hold two CTAs of
// successive launches. It must not hold two CTAs of one launch, because all other CTAs would wait
// for those two. Therefore one launch takes more than half of an SM's shared memory, and the next
// more than half of its registers. Idle warps take the registers (up to kMaxThreads, enough from 49
// registers a thread on). Above 16 rows, the sums leave no registers for a second CTA.
template <int kGroups>
constexpr bool kOverlaps = kGroups <= 2;
// Bytes of a CTA's shared memory; an SM with 228 KB holds one CTA of each size.
constexpr int kMoreShared = 116 * 1024, kLessShared = 108 * 1024;
template <typename Mma, int kGroups>
constexpr int kMaxThreads = kOverlaps<kGroups> ? 640 : kAllThreads<Mma, kGroups>;

template <typename Mma, typename T,  // __half or __nv_bfloat16
          int kGroups,               // groups of 8 rows of x: M <= 8 * kGroups
          typename Unpacker>
__global__ void __launch_bounds__(kMaxThreads<Mma, kGroups>, 1)
    packed_gemm_kernel(const __grid_constant__ PackedGemmArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // only packed_gemm_sm90.cu's kernels run there
  if constexpr (!Mma::kTensorMap) return;
#endif
  extern __shared__ __align__(1024) char shared[];
  using Ring = PackedRing<Unpacker, kGroups>;
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers + 1];
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  const Ring ring(shared, barriers, args.stages);
  const int slice = blockIdx.x;
#ifdef CPMCU_SLICE_CLUSTERS
  const SliceReceiver<T, kGroups> receiver{ring.stage(args.stages).rows,
                                           ring.barriers + 8 * Ring::kBarriers, slice, lane};
#endif
  const int first_tile = blockIdx.y, tile_step = gridDim.y;
  const int first_block = slice * args.slice_blocks + min(slice, args.longer_slices);
  const int blocks_of_tile = args.slice_blocks + (slice < args.longer_slices);

  // Barriers.
  const auto init = [&](int i) {
    // One arrival announces the bytes of bulk copies. Without TMA, the 32 lanes that copy rows of x
    // also arrive.
    const auto mine = ring.stage(i);
    ptx::mbarrier_init(mine.full, Mma::kTensorMap ? 1 : 33);
    ptx::mbarrier_init(mine.empty(), kWarps * kArrivals<kGroups>);
  };
  // All warps share the initialisation, because a barrier costs 30 to 40 cycles. Up to 8 rows one
  // warp does it all: these CTAs start early enough, and earlier loads would delay the previous
  // launch.
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
#ifdef CPMCU_SLICE_CLUSTERS
  if (args.slices > 1 && threadIdx.x == kThreads - 1) receiver.open(args);
#endif
  __syncthreads();
#ifdef CPMCU_SLICE_CLUSTERS
  if (args.slices > 1) ptx::cluster_arrive();
#endif

  // Producer.
  if (warp >= kWarps) {
    if constexpr (kMovesRegisters<Mma, kGroups>) ptx::give_registers<kProducerRegisters>();
    if (warp == kWarps) {
      produce<Mma>(args, ring, first_tile, tile_step, first_block, blocks_of_tile);
    } else {
      ptx::pdl_wait();
    }
#ifdef CPMCU_SLICE_CLUSTERS
    if (args.slices > 1) ptx::cluster_wait();
#endif
    return;
  }
  // Consumers.
  if constexpr (kMovesRegisters<Mma, kGroups>) ptx::take_registers<kConsumerRegisters>();
  ptx::pdl_wait();

  const typename Mma::template LaneRows<kGroups> lane_rows;
  const LaneWeights<Unpacker> lane_weights(args.scale_form);
  auto stage = ring.stage(0);
  for (int tile = first_tile; tile < args.tiles; tile += tile_step) {
    float sums[2][kGroups][4] = {};
    // Main loop over the k blocks of the slice.
    ptx::mbarrier_wait(stage.full, stage.parity);
    for (int left = blocks_of_tile;;) {
      const auto current = stage;
      ring.advance(stage);
      bool is_full;
      const auto poll = [&] {
        is_full = ptx::mbarrier_try_wait(stage.full, stage.parity, left > 1);
      };
      const auto release = [&] { arrive<kGroups>(current.empty()); };
      accumulate_block<Mma, Unpacker, T, kGroups>(sums, current.rows, current.weights(), lane_rows,
                                                  lane_weights, args.scale_form, poll, release);
      if (--left == 0) break;
      ptx::mbarrier_wait(stage.full, stage.parity, is_full);
    }

    // Epilogue: y, or partial sums of the slice.
    const int n0 = tile * kPackedRows;
    if (args.slices == 1) {
      store_sums<T>(args, sums, n0);
      continue;
    }
#ifdef CPMCU_SLICE_CLUSTERS
    receiver.add_up(args, sums, warp, n0);
#else
    store_partials(args, sums, slice, n0 + warp * 32 + lane / 4);
#endif
  }
}

// Adds the slices if there are no clusters.
template <typename T>
__global__ void __launch_bounds__(256)
    packed_add_slices_kernel(const __grid_constant__ PackedGemmArgs args) {
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

// Whether this launch takes more than half of an SM's registers instead of its shared memory: true
// for every second launch of a context.
bool takes_registers(const Context& ctx) {
  return ctx.overlapping_launches != nullptr && (*ctx.overlapping_launches)++ % 2 == 1;
}

// The number of threads with which a CTA takes more than half of an SM's registers and leaves
// enough for a CTA of `threads`. INT_MAX if there is none.
template <typename Kernel>
int threads_of_most_registers(Kernel kernel, int threads) {
  constexpr int kRegisters = 64 * 1024;
  cudaFuncAttributes of{};
  CHECK_CUDA(cudaFuncGetAttributes(&of, kernel));
  const int of_warp = (of.numRegs + 7) / 8 * 8 * 32;
  const int warps = kRegisters / 2 / of_warp + 1;
  return (warps + threads / 32) * of_warp <= kRegisters ? 32 * warps : INT_MAX;
}

template <typename Mma, typename T, int kGroups, typename Unpacker>
void launch_packed_kernel(const Context& ctx, PackedGemmArgs args) {
  constexpr int kStageBytes = PackedRing<Unpacker, kGroups>::kStageBytes;
  const auto kernel = packed_gemm_kernel<Mma, T, kGroups, Unpacker>;
  const bool clusters = has_clusters(ctx.code_capability);
  args.alpha /= Unpacker::template kFactor<T>;
  args.slice_blocks = args.k_blocks / args.slices;
  args.longer_slices = args.k_blocks % args.slices;
  for (int i = 0; i <= args.slices; ++i) {
    args.first_m16_tile[i] = static_cast<uint8_t>((kM16Tiles * i + args.slices - 1) / args.slices);
  }
  const bool sends = clusters && args.slices > 1;
  const int max_m16_tiles = (kM16Tiles + args.slices - 1) / args.slices;  // largest number in a CTA
  const int receive_bytes = sends ? args.slices * max_m16_tiles * kGroups * kGroupBytes : 0;
  // A CTA takes nearly all shared memory of an SM.
  int threads = kAllThreads<Mma, kGroups>;
  int shared_bytes = clusters ? kRingBytes : ring_bytes(ctx);
  allow_shared_bytes(kernel, shared_bytes);
  if constexpr (kOverlaps<kGroups>) {
    static const int more_threads = threads_of_most_registers(kernel, threads);
    if (sends && more_threads <= kMaxThreads<Mma, kGroups>) {
      const bool more = takes_registers(ctx);
      if (more) threads = more_threads;
      shared_bytes = more ? kLessShared : kMoreShared;
    }
  }
  args.stages = std::min(kMaxStages, (shared_bytes - receive_bytes) / kStageBytes);
  // early_stages: the stages that are filled with weights before x arrives. With more rows, x takes
  // longer to load, so fewer loads of weights may be queued before it. If K is not cut and there
  // are at most 32 rows, loading weights takes longer than loading x, so all stages are filled.
  args.early_stages = args.stages;
  args.early_l2_blocks = 0;
  if (sends) {
    if (kGroups > 1) args.early_stages = kGroups == 2 ? 3 : 1;
    args.early_l2_blocks = kGroups == 2 ? 2 : 1;
  } else if (clusters && kGroups == 8) {
    args.early_stages = 2;
  }
  args.rounds = args.slices > 1 ? 1 : (args.tiles + ctx.sm_count - 1) / ctx.sm_count;
  const int tile_blocks = (args.tiles + args.rounds - 1) / args.rounds;
  launch_cluster(ctx, clusters ? args.slices : 1, kernel, dim3(args.slices, tile_blocks),
                 dim3(threads), shared_bytes, args);
  if (args.slices > 1 && !clusters) {
    launch(ctx, packed_add_slices_kernel<T>, dim3((args.n / 2 + 8 + 255) / 256, args.m), dim3(256),
           0, args);
  }
}

// MmaOf<kGroups>: the multiplication policy of the kernel for kGroups groups of 8 rows.
template <template <int> typename MmaOf>
void launch_packed_rows(const Context& ctx, const PackedLayout& layout, DType dtype,
                        const PackedGemmArgs& args) {
  dispatch_half(dtype, [&](auto t) {
    const int groups = row_groups_of(layout, args.m);
    dispatch_int<1, 2, 4, 8>("groups of rows", groups, [&](auto constant) {
      constexpr int kGroups = decltype(constant)::value;
      dispatch_unpacker(layout, [&](auto unpacker) {
        using Unpacker = decltype(unpacker);
        if constexpr (kHasRows<Unpacker, kGroups>) {
          launch_packed_kernel<MmaOf<kGroups>, decltype(t), kGroups, Unpacker>(ctx, args);
        }
      });
    });
  });
}

}  // namespace
}  // namespace cpmcu::cuda
