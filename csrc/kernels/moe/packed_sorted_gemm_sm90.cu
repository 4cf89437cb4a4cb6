// packed_sorted_gemm on Hopper: y = x W[expert]^T for pairs sorted by expert, W in weight blocks.
//
// Roofline: 2 P N K operations, and the W of each expert that has pairs once. 1024 tokens of a
// 30B-A3B layer have 8192 pairs, 64 an expert: 77 GFLOP, 0.11 ms at 680 TFLOP/s, and 0.31 GB of
// int4, 0.10 ms at 3 TB/s. With 2048 tokens the operations double, the weights do not.
//
// Schedule: persistent clusters of two CTAs; a tile is 256 rows of one expert's W x 128 (or 64) of
// its pairs. The main loop is that of kernels/gemm/packed/packed_large_sm90.cu.
//   all threads    count the tiles of each expert from the offsets of moe_route
//   producer       its half of a weight block; half of the rows of x, multicast to both CTAs
//   2 warpgroups   unpack 64 rows of W in registers, wgmma, scale into float32 sums
//   epilogue       sorted_tiles.cuh
// A tile may contain pairs of the next expert: their results are computed and not stored.
//
// The surprising decision: K is never split. For every tile size, the same wgmma add the k of a
// scale, and one multiply-add applies the scale. So a pair's bits are the same in any prompt and
// any chunk, while the tile size follows the number of pairs.
#include "core/dispatch.h"
#include "kernels/gemm/packed/large.cuh"
#include "kernels/moe/sorted_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct PackedSortedArgs {
  SortedArgs all;
  const char* blocks;  // weights of expert 0
  int64_t stride;      // bytes from one expert's blocks to the next
  int block_bytes;
  uint8_t scale_form;
};

template <typename Unpacker, int kGroups>
using SortedRing =
    PackedLargeRing<Unpacker, kGroups, 8 * kGroups * kLargeRowBytes, kSortedRingBytes>;

// ---- kernels

template <typename T, int kGroups, typename Unpacker>
__global__ void __launch_bounds__(kLargeThreads, 1)
    packed_sorted_kernel(const __grid_constant__ PackedSortedArgs args) {
  using Ring = SortedRing<Unpacker, kGroups>;
  using Tiles = ExpertTiles<Ring::kRows>;
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
    const uint64_t policy = ptx::evict_first_policy();
    ptx::prefetch_map(&args.all.x_map);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      const auto at = tiles.place(tile);
      const char* blocks =
          args.blocks + at.expert * args.stride + int64_t{at.w} * k_blocks * args.block_bytes;
#pragma unroll 1
      for (int k_block = 0; k_block < k_blocks; ++k_block) {
        ptx::mbarrier_wait(ring.empty(stage), parity ^ 1);
        copy_half_block<Unpacker>(ring, stage, blocks + int64_t{k_block} * args.block_bytes, rank,
                                  args.scale_form, policy);
        copy_half_rows(ring, stage, &args.all.x_map, at.first, k_block, rank);
        Ring::advance(stage, parity);
      }
    }
  };
  const auto multiply = [&] {
    const uint32_t peer_empty = ptx::cluster_address(ring.empty(0), rank ^ 1);
    const HalfBlockRows rows;
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      float sums[kGroups][4] = {};
#pragma unroll 1
      for (int left = k_blocks; left > 0; --left) {
        ptx::mbarrier_wait(ring.full(stage), parity);
        add_half_block<T, Unpacker>(sums, ring, stage, rows, args.scale_form, peer_empty);
        Ring::advance(stage, parity);
      }
      const auto at = tiles.place(tile);
      const int column = at.w * kPackedRows + rank * kHalfRows + warpgroup * 64;
      finish_tile<T>(args.all, sums, ring.out(warpgroup), warpgroup, at.first, at.end, column);
    }
  };
  run_large(ring, produce, multiply);
}

// ---- launchers

template <typename T, int kGroups, typename Unpacker>
void launch_sorted(const Context& ctx, const SortedRows& rows, PackedSortedArgs args) {
  using Ring = SortedRing<Unpacker, kGroups>;
  const auto kernel = packed_sorted_kernel<T, kGroups, Unpacker>;
  const int m = static_cast<int>(rows.x.size(0)), k = static_cast<int>(rows.x.size(1));
  args.all.x_map = make_map(rows.x.data(), m, k, rows.x.dtype(), Ring::kRows / 2);
  args.all.alpha = 1 / Unpacker::template kFactor<T>;
  const int clusters = num_clusters(ctx, rows, args.all.w_tiles, Ring::kRows);
  allow_shared_bytes(kernel, Ring::kBytes);
  launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kLargeThreads), Ring::kBytes, args);
}

}  // namespace

// Graph-safe; reads the experts' pairs from the device.
void packed_sorted_gemm_sm90(const Context& ctx, const PackedSortedGemmParams& p) {
  PackedSortedArgs args{.all = sorted_args(p.rows, p.w.n, p.w.gated),
                        .blocks = static_cast<const char*>(p.w.blocks),
                        .stride = p.stride,
                        .block_bytes = static_cast<int>(p.w.block_bytes()),
                        .scale_form = scale_form(p.w.layout)};
  args.all.k_blocks = static_cast<int>(p.w.k_blocks());
  dispatch_half(p.rows.x.dtype(), [&](auto t) {
    const int rows = has_small_tiles(p.w.layout) ? 64 : rows_of_tile(p.rows);
    dispatch_int<64, 128>("rows of a tile", rows, [&](auto constant) {
      using T = decltype(t);
      constexpr int kGroups = decltype(constant)::value / 8;
      dispatch_unpacker(p.w.layout, [&](auto unpacker) {
        using Unpacker = decltype(unpacker);
        if constexpr (kGroups == 8 || !kHasSmallTiles<Unpacker>) {
          launch_sorted<T, kGroups, Unpacker>(ctx, p.rows, args);
        }
      });
    });
  });
}

}  // namespace cpmcu::cuda
