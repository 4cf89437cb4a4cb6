// The ring in shared memory through which all W of a chain come, and the threads that feed it.
#pragma once

#include "kernels/gemm/fused_layer/args.cuh"

namespace cpmcu::cuda::chain {

// A place in the ring: where its rows, its weights and the first of its barriers lie, and the
// parity of their phase. Addresses go on by addition: computed from a number they were a tenth of
// the instructions of a block.
struct Stage {
  uint32_t rows, weights, barrier;
  int parity;
};

// f(tile, k block) for the packed blocks of this block of threads.
template <typename F>
__device__ __forceinline__ void each_block(const Blocks& of, F f) {
  if (static_cast<int>(blockIdx.x) >= of.units) return;
  const Share share(of);
#pragma unroll 1
  for (int tile = share.tile; tile < of.tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int k_block = share.begin; k_block < share.end; ++k_block) f(tile, k_block);
  }
}

// The ring in shared memory: as many stages of rows of x and a block of W as there is room for, all
// rows first, and the barriers that say that weights, or rows, are there, or that all warps are
// done with both; that the first rows of a gemm have come; that all warps have combined theirs; and
// that this block has read what block 0 changes in the end.
template <typename Product>
struct Ring {
  static constexpr int kStageBytes = Product::kRowsBytes + Product::kWeightBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kBarriers = 3 * kStages + kMaxFusedGemms + 2;
  static_assert(kMaxFusedGemms <= kStages, "a thread for each stage initialises all barriers");
  uint32_t data, barriers;

  __device__ __forceinline__ Stage stage(int index) const {
    return {.rows = data + index * Product::kRowsBytes,
            .weights = data + kStages * Product::kRowsBytes + index * Product::kWeightBytes,
            .barrier = barriers + 8 * index,
            .parity = 0};
  }
  __device__ __forceinline__ void advance(Stage& at) const {
    at.rows += Product::kRowsBytes;
    at.weights += Product::kWeightBytes;
    at.barrier += 8;
    if (at.barrier == barriers + 8 * kStages) {
      const int parity = at.parity ^ 1;
      at = stage(0);
      at.parity = parity;
    }
  }
  static __device__ __forceinline__ uint32_t weights_in(const Stage& at) { return at.barrier; }
  static __device__ __forceinline__ uint32_t rows_in(const Stage& at) {
    return at.barrier + 8 * kStages;
  }
  static __device__ __forceinline__ uint32_t done(const Stage& at) {
    return at.barrier + 16 * kStages;
  }
  __device__ __forceinline__ uint32_t x_in(int gemm) const {
    return barriers + 8 * (3 * kStages + gemm);
  }
  __device__ __forceinline__ uint32_t combined() const {
    return barriers + 8 * (3 * kStages + kMaxFusedGemms);
  }
  __device__ __forceinline__ uint32_t bases_read() const { return combined() + 8; }
};

// Feeds the ring with weights as soon as there is room, by one thread. What is for a gemm whose x
// has not come yet comes block by block, so as not to stand in the way of sums, counters and rows
// that others wait for: once the ring has been full, or from the beginning on if blocks combine
// together.
template <typename Product>
__device__ __forceinline__ void feed_weights(const FusedLayerArgs& args, const Ring<Product>& ring,
                                             int* num_fed) {
  const uint64_t policy = ptx::evict_first_policy();
  for (int i = 0; i < args.num_gemms; ++i) {
    if (args.gemms[i].blocks == nullptr) ptx::prefetch_map(&args.gemms[i].w_map);
  }
  Stage stage = ring.stage(0), landing = stage;
  int in_flight = 0;
  bool fills = args.combines != Combines::kTogether;
#pragma unroll 1
  for (int i = 0; i < args.num_gemms; ++i) {
    const Link& gemm = args.gemms[i];
    if (static_cast<int>(blockIdx.x) >= gemm.units) continue;
    const Share share(gemm);
    const uint32_t x_in = ring.x_in(i);
    const int tiles = gemm.tiles, blocks_of_tile = share.end - share.begin;
    bool has_x = false;
    typename Product::Source source(gemm, share.tile, share.begin);
#pragma unroll 1
    for (int tile = share.tile; tile < tiles; tile += gridDim.x) {
      if (tile != share.tile) source = typename Product::Source(gemm, tile, share.begin);
#pragma unroll 1
      for (int left = blocks_of_tile; left > 0; --left) {
        // A cycle from landing to asking counts: what can be done before is.
        ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
        if (!has_x) has_x = ptx::mbarrier_has_ended(x_in, 0);
        const int limit = has_x || fills ? Product::kInFlight : 1;
#pragma unroll 1
        for (; in_flight >= limit; --in_flight) {
          ptx::mbarrier_wait(ring.weights_in(landing), landing.parity);
          ring.advance(landing);
        }
        ++in_flight;
        source.fetch(stage.weights, ring.weights_in(stage), policy);
        if constexpr (Product::kAhead > 0) atomicAdd(num_fed, 1);
        source.next();
        ring.advance(stage);
        fills = fills && stage.parity == 0;
      }
    }
  }
  ptx::pdl_wait();
}

// Feeds it with rows of x once all blocks are done with the gemms before, by another.
template <typename Product>
__device__ __forceinline__ void feed_rows(const FusedLayerArgs& args, const Ring<Product>& ring) {
  for (int i = 0; i < args.num_gemms; ++i) ptx::prefetch_map(&args.gemms[i].x_map);
  ptx::pdl_wait();
  // Read before this block arrives anywhere, so before they change: arrivals behind a gemm follow
  // from its x, those of who has no part in a gemm wait for it.
  static_assert(kMaxFusedGemms == 4);
  const uint4 bases = __ldcg(reinterpret_cast<const uint4*>(args.state->bases));
  ptx::mbarrier_arrive(ring.bases_read());
  if (args.combines == Combines::kTogether) {
    ptx::mbarrier_wait(ring.combined(), 0);
    ptx::add_release(args.state->arrived[0]);
  }
  Stage stage = ring.stage(0);
#pragma unroll 1
  for (int i = 0; i < args.num_gemms; ++i) {
    const Link& gemm = args.gemms[i];
    if ((i > 0 || args.combines == Combines::kTogether) &&
        static_cast<int>(blockIdx.x) < gemm.units) {
      const uint32_t base = i == 0 ? bases.x : i == 1 ? bases.y : i == 2 ? bases.z : bases.w;
      while (ptx::load_acquire(args.state->arrived[i]) != base + gridDim.x) {
      }
      ptx::copy_engine_fence();
    }
    // Rows that blocks have combined themselves are not waited for: they may be multiplied already,
    // and then a barrier would be asked for a phase that ends only with what this thread brings.
    const bool brings = i > 0 || args.combines != Combines::kEachItsSlice;
    each_block(gemm, [&](int, int k_block) {
      if (brings) {
        ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
        Product::fetch_rows(stage.rows, gemm, k_block, ring.rows_in(stage));
      }
      ring.advance(stage);
    });
  }
}

}  // namespace cpmcu::cuda::chain
