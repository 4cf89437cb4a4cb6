// Fused layer kernel, up to kMaxFusedRows rows: up to four dependent GEMMs of a decoder layer
// (fused_layer.h), y_i = alpha_i * x_i W_i^T + beta_i * y_i. The kernel also computes the
// norms between them, the combination of attention splits before them, and RoPE with the KV write
// after them.
//
// Roofline: all W are read once. A layer of MiniCPM4-8B takes 41 us (4 bits) or 155 us (16 bits) at
// 3 TB/s. As separate launches the GEMMs take 50 and 207 us at one row. Memory is then idle while a
// launch ends, the next one begins and its x arrives.
//
// Schedule: one persistent CTA per SM.
//   weight producer   | W tiles of GEMM 0, 1, 2, 3 -> pipeline stages; never waits for x
//   row producer      | waits for the grid barrier of GEMM i, then x tiles -> the same stages
//   prefetch warp     | one row only: W tiles further ahead -> L2 (prefetch.cuh)
//   8 consumer warps  | mma over K -> partial sums to global memory -> sum of the slices in order
//                     | -> epilogue -> arrive at the grid barrier of GEMM i + 1
// From Hopper on, a producer is one thread that issues TMA copies. Before Hopper, it is a warp that
// issues cp.async (mainloops.cuh). A GEMM has tiles of 256 rows of W. If there are fewer tiles than
// CTAs, K is cut into slices. K is also cut for a few tiles that a gated GEMM has beyond the CTAs
// (GemmArgs). The order of additions depends on N, K and the number of CTAs, so a row has the same
// bits whatever the batch.
//
// The surprising decision: a grid barrier replaces the launch between two GEMMs. It costs as much
// as a launch, but weights keep loading during it. When x arrives, the pipeline is full.
//
// Partial sums: each 16-byte fragment is its own ready flag. The buffer holds NaNs that no
// instruction produces (kNotReady). The receiver polls until none is left, adds, and restores them;
// there is no fence and no counter. For more than 16 rows there are too many fragments to poll, so
// CTAs count arrivals instead.
// Norms: the epilogue of y also writes y * norm_weight, and adds y^2 to an integer sum, whose order
// does not matter. The next GEMM reads y * norm_weight and divides its sums by the root mean
// square. RoPE, for few rows (kMaxRotatedGroups): an epilogue tile holds both elements of each
// rotated pair.
//
// Code outside the main loop runs once or a few times in a launch, from a cold instruction cache at
// two to three cycles an instruction. So loads that do not need x are issued before x arrives.
//
// Length of fused_layer_kernel: the loop over GEMMs and tiles shares its scalars with the main
// loop, the wait for other slices and the epilogue. As separate functions, these three would change
// machine code that has been tuned by measurement.
#pragma once

#include "core/trace.cuh"
#include "kernels/gemm/fused_layer/combine.cuh"
#include "kernels/gemm/fused_layer/epilogue.cuh"
#include "kernels/gemm/fused_layer/mainloops.cuh"
#include "kernels/gemm/fused_layer/prefetch.cuh"

namespace cpmcu::cuda {
namespace {

using namespace fused;

TRACED_FILE("fused_layer");

// Producer warps: one for weights, one for x, for one row one for the L2 prefetch. On Hopper the
// consumers of more than 8 rows need more registers than an equal share, so a whole warpgroup gives
// up registers.
template <typename Mainloop>
constexpr bool kMovesRegisters = Mainloop::Copies::kHopper && Mainloop::kGroups >= 2;
template <typename Mainloop>
constexpr int kProducerWarps = kMovesRegisters<Mainloop>                                    ? 4
                               : Mainloop::Copies::kHopper || Mainloop::kPrefetchBlocks > 0 ? 3
                                                                                            : 2;

// Initialises the barriers of the CTA. All warps share the work: a barrier costs 30 to 40 cycles.
template <typename Mainloop>
__device__ __forceinline__ void init_barriers(const Ring<Mainloop>& ring, int warp,
                                              int* num_loaded) {
  using Ring = Ring<Mainloop>;
  if (ptx::is_elected()) {
#pragma unroll 1
    for (int i = warp; i < ring.stages(); i += kWarps + kProducerWarps<Mainloop>) {
      const Stage mine = ring.stage(i);
      ptx::mbarrier_init(ring.weights_in(mine), kCopyLanes<typename Mainloop::Copies>);
      ptx::mbarrier_init(ring.rows_in(mine), kCopyLanes<typename Mainloop::Copies>);
      ptx::mbarrier_init(ring.done(mine), kThreads);
    }
    if (warp < kMaxFusedParts) ptx::mbarrier_init(ring.x_in(warp), 1);
    if (warp == kWarps - 1) {
      *num_loaded = 0;
      ptx::mbarrier_init(ring.combined(), kWarps);
      ptx::mbarrier_init(ring.bases_read(), 1);
    }
    ptx::mbarrier_init_fence();
  }
}

// The producer warps.
template <typename Mainloop>
__device__ __forceinline__ void produce(const FusedLayerArgs& args, const Ring<Mainloop>& ring,
                                        int warp, int* num_loaded) {
  const auto is_producer = [&](int number) {
    if constexpr (Mainloop::Copies::kEngine) {
      return threadIdx.x == kThreads + 32 * number;
    } else {
      return warp == kWarps + number;
    }
  };
  if (is_producer(0)) {
    produce_weights(args, ring, num_loaded);
  } else if (is_producer(1)) {
    produce_rows(args, ring);
  } else {
    if constexpr (Mainloop::kPrefetchBlocks > 0) {
      if (warp == kWarps + 2 && args.prefetch_cycles > 0) {
        prefetch_weights<Mainloop>(args, num_loaded);
      }
    }
    ptx::pdl_wait();
  }
}

// A CTA without a part in GEMM i arrives at its grid barrier at once.
template <typename Mainloop>
__device__ __forceinline__ void arrive_without_part(const FusedLayerArgs& args,
                                                    const Ring<Mainloop>& ring,
                                                    uint32_t& launch_parity) {
  if (static_cast<int>(blockIdx.x) >= args.min_active_ctas) {
    ptx::opaque(launch_parity);  // all warps read it before CTA 0 may change it
    ptx::named_barrier<1, kThreads>();
    ptx::mbarrier_wait(ring.bases_read(), 0);
    for (int i = 0; i < args.num_parts && threadIdx.x == 0; ++i) {
      const GemmArgs& gemm = args.parts[i];
      if (gemm.number + 1 < args.num_gemms && !gemm.is_rest &&
          static_cast<int>(blockIdx.x) >= gemm.active_ctas) {
        ptx::add_release(args.state->arrived[gemm.number + 1]);
      }
    }
  }
}

// Stores the partial sums of a warp tile for the CTA that adds its slices. A slice has kFragments
// fragments of 16 bytes.
template <int kFragments, int kGroups>
__device__ __forceinline__ void send_sums(const float (&sums)[2][kGroups][4], char* fragments,
                                          int slice, int warp, int q2, int m) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group * 8 + q2 < m) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        ptx::store_relaxed16(
            fragments + (slice * kFragments + ((warp * kGroups + group) * 2 + t) * 32) * 16,
            sums[t][group]);
      }
    }
  }
}

// kSumsRanks: GEMMs may be divided among ranks.
template <typename Mainloop, bool kSumsRanks>
__global__ void __launch_bounds__(kThreads + 32 * kProducerWarps<Mainloop>, 1) fused_layer_kernel(
    const __grid_constant__ FusedLayerArgs args,
    const __grid_constant__ AttentionArgs<typename Mainloop::Element> attention) {
  using T = typename Mainloop::Element;
  using Ring = Ring<Mainloop>;
  constexpr int kGroups = Mainloop::kGroups;
  constexpr bool kCountsArrivals = kGroups > kMaxFlaggedGroups;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  __shared__ float row_scales[8 * kGroups];
  __shared__ int num_loaded;
  [[maybe_unused]] __shared__ RankRounds rank_rounds;
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  Ring ring{ptx::shared_address(shared), ptx::shared_address(barriers), args.num_stages};
  ptx::opaque(ring.data);  // so it is computed once
  ptx::opaque(ring.barriers);
  Stage stage = ring.stage(0);

  Trace trace;

  ptx::pdl_launch();
  init_barriers(ring, warp, &num_loaded);
  __syncthreads();
  if (warp >= kWarps) {
    if constexpr (kMovesRegisters<Mainloop>) ptx::give_registers<kProducerRegisters>();
    produce(args, ring, warp, &num_loaded);
    return;
  }
  if constexpr (kMovesRegisters<Mainloop>) ptx::take_registers<kConsumerRegisters>();
  if (args.combine_mode == CombineMode::kGridWide) {
    args.head_dim == 64 ? combine_rows<2>(args, attention, ring.combined())
                        : combine_rows<4>(args, attention, ring.combined());
  }
  if constexpr (Mainloop::kCombinesSlice) {
    if (args.combine_mode == CombineMode::kPerCtaSlice &&
        static_cast<int>(blockIdx.x) < args.parts[0].active_ctas) {
      combine_slice(shared, ring, args, attention);
    }
  }
  ptx::pdl_wait();
  trace.stamp(1);
  uint32_t launch_parity = __ldcg(&args.state->launches) % 2;
  if (kSumsRanks && threadIdx.x == 0) {
    rank_rounds = {.before = __ldcg(args.exchange.rounds),
                   .is_silent = __ldcg(&args.exchange.state[kSilent]) != 0,
                   .waits = __ldcg(&args.exchange.state[kGaveUp]) == 0};
  }
  arrive_without_part(args, ring, launch_parity);
  if (blockIdx.x == 0) {
    ExactSum* next = args.state->squares[launch_parity ^ 1][0];
#pragma unroll 1
    for (int i = threadIdx.x; i < kMaxFusedGemms * kMaxFusedRows; i += kThreads) next[i] = {0, 0};
  }

  const int g = lane / 4, q2 = lane % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < args.num_parts; ++i) {
    const GemmArgs& gemm = args.parts[i];
    if (static_cast<int>(blockIdx.x) >= gemm.active_ctas) continue;
    const CtaRange range(gemm);
    const Mainloop mainloop(gemm);
    T* const y = static_cast<T*>(gemm.y);
    const bool alone = gemm.slices == 1 && gemm.gated;  // no slices to add: the sums are final
    const bool rotated =
        kGroups <= Mainloop::Copies::kMaxRotatedGroups && gemm.rope_pair_stride > 1;
    // The warp tiles (32 rows of W each) whose slices this CTA adds.
    const int slice = range.slice;
    const int first_warp_tile = gemm.over_slices(kWarps * slice + gemm.slices - 1);
    const int num_epilogue_tiles =
        (gemm.over_slices(kWarps * (slice + 1) + gemm.slices - 1) - first_warp_tile) * kGroups;
#pragma unroll 1
    for (int tile = range.tile; tile < gemm.tiles; tile += gridDim.x) {
      const int n0 = tile * kPackedRows;
      EpilogueTiles<T, kGroups, kSumsRanks> epilogue{args,    gemm, y, n0, first_warp_tile,
                                                     rotated, g,    q2};
      if (rotated && warp < num_epilogue_tiles) epilogue.load_rotations(warp);
      if (kGroups < 8 && !alone && warp < num_epilogue_tiles) epilogue.load_weights(warp);
      // Wait for x. Once it is here, all GEMMs before are complete.
      ptx::mbarrier_wait(ring.rows_in(stage), stage.parity);
      if (threadIdx.x == 0 && tile == range.tile) {
        ptx::mbarrier_arrive(ring.x_in(i));
        trace.stamp(3 * gemm.number + 2);
      }
      // The value of the counter once all slices have arrived; read before this CTA adds its own.
      [[maybe_unused]] uint32_t all_summed = 0;
      if (kCountsArrivals && gemm.slices > 1 && threadIdx.x == 0) {
        all_summed =
            (__ldcg(args.state->summed[gemm.number][tile - gemm.first_tile]) / kSummed + 1) *
            kSummed;
      }
      ExactSum squares_of_x{};
      const auto prefetch = [&] {
        if (gemm.inv_size != 0 && threadIdx.x < args.m) {
          const ExactSum& sum = args.state->squares[launch_parity][gemm.number - 1][threadIdx.x];
          squares_of_x = {__ldcg(&sum.high), __ldcg(&sum.low)};
        }
        if (!alone && warp < num_epilogue_tiles) epilogue.load_old(warp);
      };
      if constexpr (kGroups < 8) prefetch();  // with 8 groups, registers are too few

      // Main loop over this CTA's k blocks of the tile.
      float sums[2][kGroups][4] = {};
      ptx::mbarrier_wait(ring.weights_in(stage), stage.parity);
      for (int left = range.end - range.begin;;) {
        const Stage current = stage;
        ring.advance(stage);
        bool has_rows, has_weights;
        const auto poll = [&] {
          // Do not poll for the next GEMM: a poll may suspend the warp.
          const bool polls = left > 1;
          has_rows = ptx::mbarrier_try_wait(ring.rows_in(stage), stage.parity, polls);
          has_weights = ptx::mbarrier_try_wait(ring.weights_in(stage), stage.parity, polls);
        };
        // Every lane arrives. That costs no more than one arrival of the warp, and
        // compute-sanitizer's racecheck understands it.
        const auto release = [&] { ptx::mbarrier_arrive(ring.done(current)); };
        mainloop.accumulate_block(sums, current.rows, current.weights, poll, release);
        if (--left == 0) break;
        ptx::mbarrier_wait(ring.rows_in(stage), stage.parity, has_rows);
        ptx::mbarrier_wait(ring.weights_in(stage), stage.parity, has_weights);
      }

      trace.stamp(3 * gemm.number + 3);
      if constexpr (kGroups >= 8) {
        prefetch();
        if (!alone && warp < num_epilogue_tiles) epilogue.load_weights(warp);
      }
      // Scales: alpha, and the norm of x.
      if (threadIdx.x < 8 * kGroups) {
        float scale = gemm.alpha;
        if (gemm.inv_size != 0) {
          scale *= rsqrtf(squares_of_x.value() * gemm.inv_size + gemm.eps);
        }
        row_scales[threadIdx.x] = scale;
      }
      if (alone && n0 + kPackedRows <= gemm.n) {
        ptx::named_barrier<1, kThreads>();
        store_gated<T>(gemm, y, sums, row_scales, args.m, n0 + warp * 32 + g, g, q2);
        ptx::named_barrier<1, kThreads>();
        continue;
      }

      // Partial sums go to the CTA that owns their warp tile, even if it is this one.
      constexpr int kFragments = kWarps * kGroups * 2 * 32;  // fragments of a CTA
      const int first_cta = gemm.slices == 1 ? blockIdx.x : blockIdx.x - slice;
      char* const fragments = args.fragments + (int64_t{first_cta} * kFragments + lane) * 16;
      send_sums<kFragments>(sums, fragments, slice, warp, q2, args.m);
      ptx::named_barrier<1, kThreads>();  // row_scales are complete
      if (kCountsArrivals && gemm.slices > 1) {
        if (threadIdx.x == 0) {
          uint32_t* const summed = args.state->summed[gemm.number][tile - gemm.first_tile];
          ptx::add_release(summed, slice == 0 ? kSummed - gemm.slices + 1 : 1);
          while (static_cast<int>(ptx::load_acquire(summed) - all_summed) < 0) {
          }
        }
        ptx::named_barrier<1, kThreads>();
      }
      // Epilogue: one tile a warp.
#pragma unroll 1
      for (int epilogue_tile = warp; epilogue_tile < num_epilogue_tiles; epilogue_tile += kWarps) {
        if (kGroups > 1 && epilogue_tile != warp) {
          epilogue.load_weights(epilogue_tile), epilogue.load_old(epilogue_tile);
        }
        const auto place = epilogue.place_of(epilogue_tile);
        float sum[2][4] = {};
        epilogue.template add_slices<kCountsArrivals, Mainloop::kClearsSlices>(
            sum, place, fragments, kFragments);
        __syncwarp();
        if (rotated) {
          epilogue.store_rotated(place, sum, row_scales);
          continue;
        }
        if constexpr (kSumsRanks) {
          if (gemm.rank_sum > 0) epilogue.add_ranks(place, sum, row_scales, rank_rounds);
        }
        float squares[2] = {};
        epilogue.store(place, sum, row_scales, squares);
        if (gemm.normed == nullptr) continue;
        epilogue.add_squares(place.row, squares, args.state->squares[launch_parity][gemm.number]);
      }
      ptx::named_barrier<1, kThreads>();
    }
    trace.stamp(3 * gemm.number + 4);
    const bool has_rest = i + 1 < args.num_parts && args.parts[i + 1].is_rest &&
                          static_cast<int>(blockIdx.x) < args.parts[i + 1].active_ctas;
    if (gemm.number + 1 < args.num_gemms && !has_rest && threadIdx.x == 0) {
      ptx::add_release(args.state->arrived[gemm.number + 1]);
    }
  }
  trace.end();
  if (Mainloop::kPrefetchBlocks > 0 && threadIdx.x == 0) atomicAdd(&num_loaded, kNoMoreLoads);
  // CTA 0 works on every GEMM, so it has waited at all grid barriers. Therefore all CTAs have
  // arrived there. They read `bases` and `launches` before they arrived.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (args.combine_mode == CombineMode::kGridWide) args.state->bases[0] += gridDim.x;
    for (int i = 1; i < args.num_gemms; ++i) args.state->bases[i] += gridDim.x;
    if (args.num_gemms > 1) ++args.state->launches;
    if (kSumsRanks) *args.exchange.rounds += args.num_rank_sums;
  }
}

}  // namespace
}  // namespace cpmcu::cuda
