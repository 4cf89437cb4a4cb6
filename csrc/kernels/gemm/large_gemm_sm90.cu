// large_gemm on Hopper: y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y for any M; gated_gemm: y
// [M, N / 2] = silu(x gate^T) * (x up^T), W stacks gate and up.
//
// Roofline: 2 M N K operations and 2 N K bytes of W; below about 300 rows the bytes dominate. A
// layer of MiniCPM4-8B takes 0.16 ms for its weights, and 1.4 ms for 2048 rows at 680 TFLOP/s.
//
// Schedule: persistent clusters of two CTAs, which go from tile to tile.
//             CTA 0: 128 rows of W   CTA 1: 128 rows of W
//   x rows        half ----multicast---- half          256, 128 or 64 rows a tile
//   producer      TMA, 64 k a stage: W of this CTA, x for both CTAs
//   2 warpgroups  wgmma of 64 rows of W x all rows of x; sums -> shared memory -> y
//   (large_tiles.cuh)
// The rows of y are columns of the accumulator, so the epilogue transposes them in shared memory.
// For a gated W, TMA interleaves eight rows of gate and eight of up, so both sums of an output are
// in one thread.
//
// The surprising decision: K is never split. One accumulator adds all of K, 16 k at a time,
// whatever the tile. So the bits do not depend on M, and the tile size is free to follow M. A
// library with one algorithm for all M would multiply a prompt of a few rows as if it had 2048.
#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/large_tiles.cuh"
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda {
namespace {

struct LargeArgs {
  TensorMap x_map, w_map;
  void* y;
  int64_t y_stride;
  int m, n, k_blocks;  // k_blocks: number of k blocks of 64
  LargeTiles tiles;
  float alpha, beta;
  bool gated;
};

constexpr int kWRows = 128;  // rows of W that a CTA has
// A tile has 8 kGroups rows of x; the epilogue stores at most 128 of them at a time.
template <int kGroups>
constexpr int kOutGroups = kGroups < 16 ? kGroups : 16;
template <int kGroups>
using DenseRing =
    LargeRing<8 * kGroups * 128, kWRows * 128, 8 * kOutGroups<kGroups> * kLargeRowBytes>;

// Producer thread of CTA `rank` of a cluster.
template <int kGroups>
__device__ __forceinline__ void produce(const LargeArgs& args, const DenseRing<kGroups>& ring,
                                        int rank) {
  using Ring = DenseRing<kGroups>;
  constexpr int kHalfRows = 4 * kGroups;
  ptx::prefetch_map(&args.x_map);
  ptx::prefetch_map(&args.w_map);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int tile = args.tiles.first(); tile < args.tiles.count(); tile += args.tiles.step()) {
    const auto at = args.tiles.place(tile);
    const int w_row = (2 * at.w + rank) * kWRows, x_row = (2 * at.x + rank) * kHalfRows;
#pragma unroll 1
    for (int k_block = 0; k_block < args.k_blocks; ++k_block) {
      const int k = k_block * kStageK;
      ptx::mbarrier_wait(ring.empty(stage), parity ^ 1);
      ptx::mbarrier_expect_bytes(ring.full(stage), Ring::kStageBytes);
      if (args.gated) {
        ptx::tensor_copy4(ring.weights(stage), &args.w_map, k, w_row / 16, ring.full(stage));
      } else {
        ptx::tensor_copy(ring.weights(stage), &args.w_map, k, w_row, ring.full(stage));
      }
      // x is read from here on. Every cluster has a tile.
      if (k_block == 0 && tile == args.tiles.first()) ptx::pdl_wait();
      ptx::tensor_multicast(ring.rows(stage) + rank * kHalfRows * 128, &args.x_map, k, x_row,
                            ring.full(stage), 0b11);
      Ring::advance(stage, parity);
    }
  }
}

// ---- kernels

template <typename T, int kGroups>
__global__ void __launch_bounds__(kLargeThreads, 1)
    large_gemm_sm90_kernel(const __grid_constant__ LargeArgs args) {
  using Ring = DenseRing<kGroups>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  const Ring ring(shared, barriers);
  const int warpgroup = ptx::uniform_warp() / 4, rank = blockIdx.x % 2;

  const auto multiply = [&] {
    const uint32_t peer_empty = ptx::cluster_address(ring.empty(0), rank ^ 1);
    const int width = args.gated ? args.n / 2 : args.n;
    const LargeOut<T> out(args.y, width, args.y_stride, args.m, args.beta != 0);
    const auto update = [&](float sum, float old) {
      const float value = __fmul_rn(args.alpha, sum);
      return args.beta == 0 ? value : __fmaf_rn(args.beta, old, value);
    };
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = args.tiles.first(); tile < args.tiles.count(); tile += args.tiles.step()) {
      float sums[kGroups][4];
      multiply_stages<T>(sums, ring, args.k_blocks, stage, parity, peer_empty);
      const auto at = args.tiles.place(tile);
      const int column = (2 * at.w + rank) * kWRows + warpgroup * 64;
      // Epilogue, kAtOnce groups at a time.
      constexpr int kAtOnce = kOutGroups<kGroups>;
#pragma unroll
      for (int group = 0; group < kGroups; group += kAtOnce) {
        const auto& part = *reinterpret_cast<const float (*)[kAtOnce][4]>(&sums[group]);
        const int row = (at.x * kGroups + group) * 8;
        if (args.gated) {
          out.store_gated(part, ring.out(warpgroup), warpgroup, row, column / 2,
                          [](float gate, float up) { return silu(gate) * up; });
        } else {
          out.store(part, ring.out(warpgroup), warpgroup, row, column, update);
        }
      }
    }
  };
  run_large(ring, [&] { produce<kGroups>(args, ring, rank); }, multiply);
}

// ---- launchers

template <typename T, int kGroups>
void launch_large(const Context& ctx, const GemmParams& p, LargeArgs args) {
  using Ring = DenseRing<kGroups>;
  const auto kernel = large_gemm_sm90_kernel<T, kGroups>;
  const int k = static_cast<int>(p.x.size(1));
  args.x_map = make_map(p.x.data(), args.m, k, p.x.dtype(), 4 * kGroups);
  args.w_map = args.gated ? make_gated_map(p.w.data(), args.n, k, p.w.dtype(), kWRows)
                          : make_map(p.w.data(), args.n, k, p.w.dtype(), kWRows);
  args.tiles.of_x = (args.m + 8 * kGroups - 1) / (8 * kGroups);
  const int clusters = std::min(ctx.sm_count / 2, args.tiles.count());
  allow_shared_bytes(kernel, Ring::kBytes);
  launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kLargeThreads), Ring::kBytes, args);
}

// The tile size in rows of x with the least estimated time. Times are relative to a tile of 256
// rows. A smaller tile also reads all of its rows of W, so its time is more than proportional. The
// choice changes no bit.
int rows_of_tile(const Context& ctx, const LargeArgs& args) {
  constexpr std::pair<int, double> kTimes[] = {{256, 1}, {128, 0.56}, {64, 0.36}};
  int best = 0;
  double least = 0;
  for (const auto& [rows, time] : kTimes) {
    const int clusters = ctx.sm_count / 2, tiles = args.tiles.of_w * ((args.m + rows - 1) / rows);
    const double all = time * ((tiles + clusters - 1) / clusters);
    if (best == 0 || all < least) best = rows, least = all;
  }
  return best;
}

}  // namespace

void large_gemm_sm90(const Context& ctx, const GemmParams& p, bool gated) {
  const int n = static_cast<int>(p.w.size(0)), k = static_cast<int>(p.x.size(1));
  const LargeArgs args{.y = p.y.data(),
                       .y_stride = p.y_stride ? p.y_stride : p.y.size(1),
                       .m = static_cast<int>(p.x.size(0)),
                       .n = n,
                       .k_blocks = (k + 63) / 64,
                       .tiles = {.of_w = (n + 255) / 256},
                       .alpha = p.alpha,
                       .beta = p.beta,
                       .gated = gated};
  dispatch_half(p.x.dtype(), [&](auto t) {
    dispatch_int<64, 128, 256>("rows of a tile", rows_of_tile(ctx, args), [&](auto rows) {
      launch_large<decltype(t), decltype(rows)::value / 8>(ctx, p, args);
    });
  });
}

}  // namespace cpmcu::cuda
