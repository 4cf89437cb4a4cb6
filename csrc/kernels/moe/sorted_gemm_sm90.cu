// sorted_gemm on Hopper: y = x W[expert]^T for pairs sorted by expert, W [E, N, K] of 16 bits.
//
// Roofline: 2 P N K operations, and the W of each expert that has pairs once, 2 N K bytes. 1024
// tokens of a 30B-A3B layer: 77 GFLOP, 0.11 ms at 680 TFLOP/s; but 1.2 GB of weights, 0.40 ms at
// 3 TB/s. From about 4000 tokens on, operations dominate.
//
// Schedule: persistent clusters of two CTAs; a tile is 256 rows of one expert's W x 128 (or 64) of
// its pairs. The main loop is that of kernels/gemm/large_gemm_sm90.cu, the order of tiles and the
// epilogue are in sorted_tiles.cuh. TMA interleaves eight rows of gate and eight of up.
//
// The surprising decision: the tensor map of W spans all experts, so a tile at the end of an
// expert's W may load rows of the next one. Their sums are not stored. The alternative is a map of
// 128 bytes for each expert, in memory.
#include "core/dispatch.h"
#include "kernels/moe/sorted_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct DenseSortedArgs {
  SortedArgs all;
  TensorMap w_map;
  int n;  // rows of W of one expert
};

constexpr int kWRows = 128;  // rows of W that a CTA has
template <int kGroups>
using SortedRing =
    LargeRing<8 * kGroups * 128, kWRows * 128, 8 * kGroups * kLargeRowBytes, kSortedRingBytes>;

// ---- kernels

template <typename T, int kGroups>
__global__ void __launch_bounds__(kLargeThreads, 1)
    sorted_kernel(const __grid_constant__ DenseSortedArgs args) {
  using Ring = SortedRing<kGroups>;
  using Tiles = ExpertTiles<8 * kGroups>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  __shared__ typename Tiles::Memory memory;
  ptx::pdl_launch();
  ptx::pdl_wait();  // the experts are the result of an earlier kernel
  const Ring ring(shared, barriers);
  const Tiles tiles(memory, args.all);
  const int warpgroup = ptx::uniform_warp() / 4, rank = blockIdx.x % 2;
  const int k_blocks = args.all.k_blocks;

  const auto produce = [&] {
    constexpr int kHalfRows = 4 * kGroups;
    ptx::prefetch_map(&args.all.x_map);
    ptx::prefetch_map(&args.w_map);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      const auto at = tiles.place(tile);
      const int w_row = (2 * at.w + rank) * kWRows, x_row = at.first + rank * kHalfRows;
#pragma unroll 1
      for (int k_block = 0; k_block < k_blocks; ++k_block) {
        const int k = k_block * kStageK;
        ptx::mbarrier_wait(ring.empty(stage), parity ^ 1);
        ptx::mbarrier_expect_bytes(ring.full(stage), Ring::kStageBytes);
        if (args.all.gated) {
          ptx::tensor_copy4(ring.weights(stage), &args.w_map, k,
                            at.expert * (args.n / 8) + w_row / 16, ring.full(stage));
        } else {
          ptx::tensor_copy(ring.weights(stage), &args.w_map, k, at.expert * args.n + w_row,
                           ring.full(stage));
        }
        ptx::tensor_multicast(ring.rows(stage) + rank * kHalfRows * 128, &args.all.x_map, k, x_row,
                              ring.full(stage), 0b11);
        Ring::advance(stage, parity);
      }
    }
  };
  const auto multiply = [&] {
    const uint32_t peer_empty = ptx::cluster_address(ring.empty(0), rank ^ 1);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      float sums[kGroups][4];
      multiply_stages<T>(sums, ring, k_blocks, stage, parity, peer_empty);
      const auto at = tiles.place(tile);
      const int column = (2 * at.w + rank) * kWRows + warpgroup * 64;
      finish_tile<T>(args.all, sums, ring.out(warpgroup), warpgroup, at.first, at.end, column);
    }
  };
  run_large(ring, produce, multiply);
}

// ---- launchers

template <typename T, int kGroups>
void launch_sorted(const Context& ctx, const SortedGemmParams& p, DenseSortedArgs args) {
  using Ring = SortedRing<kGroups>;
  const auto kernel = sorted_kernel<T, kGroups>;
  const int m = static_cast<int>(p.rows.x.size(0)), k = static_cast<int>(p.rows.x.size(1));
  const int num_experts = args.all.num_experts;
  const DType dtype = p.w.dtype();
  args.all.x_map = make_map(p.rows.x.data(), m, k, dtype, 4 * kGroups);
  args.w_map = p.gated ? make_gated_map(p.w.data(), args.n, k, dtype, kWRows, num_experts)
                       : make_map(p.w.data(), num_experts * args.n, k, dtype, kWRows);
  const int clusters = num_clusters(ctx, p.rows, args.all.w_tiles, 8 * kGroups);
  allow_shared_bytes(kernel, Ring::kBytes);
  launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kLargeThreads), Ring::kBytes, args);
}

}  // namespace

// Graph-safe; reads the experts' pairs from the device.
void sorted_gemm_sm90(const Context& ctx, const SortedGemmParams& p) {
  const int n = static_cast<int>(p.w.size(1));
  DenseSortedArgs args{.all = sorted_args(p.rows, n, p.gated), .w_map = {}, .n = n};
  args.all.k_blocks = static_cast<int>((p.w.size(2) + kStageK - 1) / kStageK);
  dispatch_half(p.w.dtype(), [&](auto t) {
    dispatch_int<64, 128>("rows of a tile", rows_of_tile(p.rows), [&](auto rows) {
      launch_sorted<decltype(t), decltype(rows)::value / 8>(ctx, p, args);
    });
  });
}

}  // namespace cpmcu::cuda
