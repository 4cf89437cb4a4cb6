// The pipeline in shared memory that carries all W and x of the fused layer kernel, and its two
// producers.
#pragma once

#include "kernels/gemm/fused_layer/args.cuh"

namespace cpmcu::cuda::fused {

// A stage: addresses of its rows, its weights and its first barrier, and the phase parity.
// Addresses advance by addition; computing them from an index took a tenth of the instructions of a
// k block.
struct Stage {
  uint32_t rows, weights, barrier;
  int parity;
};

// Calls f(tile, k block) for the work range of this CTA.
template <typename F>
__device__ __forceinline__ void each_block(const WeightBlocks& of, F f) {
  if (static_cast<int>(blockIdx.x) >= of.active_ctas) return;
  const CtaRange range(of);
#pragma unroll 1
  for (int tile = range.tile; tile < of.tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int k_block = range.begin; k_block < range.end; ++k_block) f(tile, k_block);
  }
}

// As many stages as the device's shared memory takes: rows of x of all stages first, then their
// weight blocks. Barriers:
//   weights_in  a stage's weights have arrived
//   rows_in     a stage's rows of x have arrived
//   done        all consumer warps are done with a stage
//   x_in        the first rows of a part have arrived
//   combined    all warps have combined their share of x
//   bases_read  the producer has read `bases`, which CTA 0 changes at the end
template <typename Mainloop>
struct Ring {
  using Copies = typename Mainloop::Copies;
  static constexpr int kStageBytes = Mainloop::kRowsBytes + Mainloop::kWeightBytes;
  static constexpr int kMinStages = Copies::kMinBytes / kStageBytes;
  static constexpr int kMaxStages = Copies::kMaxBytes / kStageBytes;
  static constexpr int kBarriers = 3 * kMaxStages + kMaxFusedParts + 2;
  static_assert(kMaxFusedParts <= kWarps, "each warp initialises at most one x_in");
  uint32_t data, barriers;
  int num_stages;  // read only if it depends on the device

  __device__ __forceinline__ int stages() const {
    return kMinStages == kMaxStages ? kMaxStages : num_stages;
  }
  // Most loads of weights in flight.
  __device__ __forceinline__ int in_flight() const { return min(Mainloop::kInFlight, stages()); }
  __device__ __forceinline__ Stage stage(int index) const {
    return {.rows = data + index * Mainloop::kRowsBytes,
            .weights = data + stages() * Mainloop::kRowsBytes + index * Mainloop::kWeightBytes,
            .barrier = barriers + 8 * index,
            .parity = 0};
  }
  __device__ __forceinline__ void advance(Stage& at) const {
    at.rows += Mainloop::kRowsBytes;
    at.weights += Mainloop::kWeightBytes;
    at.barrier += 8;
    if (at.barrier == barriers + 8 * stages()) {
      const int parity = at.parity ^ 1;
      at = stage(0);
      at.parity = parity;
    }
  }
  static __device__ __forceinline__ uint32_t weights_in(const Stage& at) { return at.barrier; }
  static __device__ __forceinline__ uint32_t rows_in(const Stage& at) {
    return at.barrier + 8 * kMaxStages;
  }
  static __device__ __forceinline__ uint32_t done(const Stage& at) {
    return at.barrier + 16 * kMaxStages;
  }
  __device__ __forceinline__ uint32_t x_in(int gemm) const {
    return barriers + 8 * (3 * kMaxStages + gemm);
  }
  __device__ __forceinline__ uint32_t combined() const {
    return barriers + 8 * (3 * kMaxStages + kMaxFusedParts);
  }
  __device__ __forceinline__ uint32_t bases_read() const { return combined() + 8; }
};

// The value of the first lane, if a warp copies.
template <typename Mainloop, typename V>
__device__ __forceinline__ V of_first_lane(V value) {
  return Mainloop::Copies::kEngine ? value : __shfl_sync(0xffffffffu, value, 0);
}
// Waits for this thread's cp.async copies. No copies may be in flight when a warp ends.
__device__ __forceinline__ void end_copies() {
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Weight producer, one thread with TMA and a warp without: loads into every free stage.
// Until x of a GEMM has arrived, it keeps only one load in flight. Partial sums, counters and x of
// other CTAs then do not queue behind weights. The first fill of the pipeline is exempt, unless all
// CTAs share the combination of attention splits.
template <typename Mainloop>
__device__ __forceinline__ void produce_weights(const FusedLayerArgs& args,
                                                const Ring<Mainloop>& ring, int* num_loaded) {
  constexpr bool kEngine = Mainloop::Copies::kEngine;
  const uint64_t policy = ptx::evict_first_policy();
  if constexpr (kEngine) {
    for (int i = 0; i < args.num_parts; ++i) {
      if (args.parts[i].blocks == nullptr) ptx::prefetch_map(&args.parts[i].w_map);
    }
  }
  Stage stage = ring.stage(0), landing = stage;
  int in_flight = 0;
  bool fills = args.combine_mode != CombineMode::kGridWide;
#pragma unroll 1
  for (int i = 0; i < args.num_parts; ++i) {
    const GemmArgs& gemm = args.parts[i];
    if (static_cast<int>(blockIdx.x) >= gemm.active_ctas) continue;
    const CtaRange range(gemm);
    const uint32_t x_in = ring.x_in(i);
    const int tiles = gemm.tiles, blocks_of_tile = range.end - range.begin;
    bool has_x = gemm.is_rest;
    typename Mainloop::Source source(gemm, range.tile, range.begin);
#pragma unroll 1
    for (int tile = range.tile; tile < tiles; tile += gridDim.x) {
      if (tile != range.tile) source = typename Mainloop::Source(gemm, tile, range.begin);
#pragma unroll 1
      for (int left = blocks_of_tile; left > 0; --left) {
        // All address computations precede this wait, to shorten the time from arrival to the next
        // load.
        ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
        if (!has_x) has_x = of_first_lane<Mainloop>(ptx::mbarrier_has_ended(x_in, 0));
        const int limit = has_x || fills ? ring.in_flight() : 1;
#pragma unroll 1
        for (; in_flight >= limit; --in_flight) {
          ptx::mbarrier_wait(ring.weights_in(landing), landing.parity);
          ring.advance(landing);
        }
        ++in_flight;
        source.fetch(stage.weights, ring.weights_in(stage), policy);
        if (Mainloop::kPrefetchBlocks > 0 && (kEngine || threadIdx.x % 32 == 0)) {
          atomicAdd(num_loaded, 1);
        }
        source.next();
        ring.advance(stage);
        fills = fills && stage.parity == 0;
      }
    }
  }
  if constexpr (!kEngine) end_copies();
  ptx::pdl_wait();
}

// The row producer. Like the weight producer it fills stages. It loads x of a GEMM once all CTAs
// have arrived at its grid barrier.
template <typename Mainloop>
__device__ __forceinline__ void produce_rows(const FusedLayerArgs& args,
                                             const Ring<Mainloop>& ring) {
  constexpr bool kEngine = Mainloop::Copies::kEngine;
  const bool leads = kEngine || threadIdx.x % 32 == 0;
  if constexpr (kEngine) {
    for (int i = 0; i < args.num_parts; ++i) ptx::prefetch_map(&args.parts[i].x_map);
  }
  ptx::pdl_wait();
  // The first lane reads `bases` before this CTA arrives at any grid barrier, and so before CTA 0
  // changes it. A CTA with a part in a GEMM arrives only after its x. A CTA without a part waits
  // for bases_read.
  static_assert(kMaxFusedGemms == 4);
  uint4 bases{};
  if (leads) {
    bases = __ldcg(reinterpret_cast<const uint4*>(args.state->bases));
    ptx::mbarrier_arrive(ring.bases_read());
  }
  if (args.combine_mode == CombineMode::kGridWide) {
    ptx::mbarrier_wait(ring.combined(), 0);
    if (leads) ptx::add_release(args.state->arrived[0]);
  }
  Stage stage = ring.stage(0);
#pragma unroll 1
  for (int i = 0; i < args.num_parts; ++i) {
    const GemmArgs& gemm = args.parts[i];
    const int number = gemm.number;
    if (!gemm.is_rest && (number > 0 || args.combine_mode == CombineMode::kGridWide) &&
        static_cast<int>(blockIdx.x) < gemm.active_ctas) {
      const uint32_t base = of_first_lane<Mainloop>(number == 0   ? bases.x
                                                    : number == 1 ? bases.y
                                                    : number == 2 ? bases.z
                                                                  : bases.w);
      while (ptx::load_acquire(args.state->arrived[number]) != base + gridDim.x) {
      }
      if constexpr (kEngine) ptx::copy_engine_fence();
    }
    // If each CTA combines its slice of x, this thread skips the stages of GEMM 0 and does not wait
    // for their `done`. Their rows may be consumed already. The wait would then be for the next
    // phase, which needs rows that only this thread loads: a deadlock.
    const bool brings = i > 0 || args.combine_mode != CombineMode::kPerCtaSlice;
    each_block(gemm, [&](int, int k_block) {
      if (brings) {
        ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
        Mainloop::fetch_rows(stage.rows, gemm, args.m, k_block, ring.rows_in(stage));
      }
      ring.advance(stage);
    });
  }
  if constexpr (!kEngine) end_copies();
}

}  // namespace cpmcu::cuda::fused
