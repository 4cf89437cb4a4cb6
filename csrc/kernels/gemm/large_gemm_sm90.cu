// large_gemm on Hopper: y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y of any number of rows;
// and gated_gemm: y [M, N / 2] = silu(x gate^T) * (x up^T), W stacks both.
//
// Roofline: 2 M N K operations beside 2 N K bytes of W, which are the more up to some 300 rows: a
// layer of MiniCPM4-8B takes 0.16 ms for its weights and, at 2048 rows, 1.4 ms at 680 TFLOP/s.
//
// The surprising decision: no sum is ever cut. An output is added up in one accumulator over all of
// K, 16 k at a time, whatever the tile that it lies in. So its bits do not depend on M, tiles may
// be as large as M asks for, and a prompt of a few rows need not be multiplied as if it had 2048,
// as with a library whose algorithm is chosen once for all M.
//
// Work: two blocks of threads, a cluster, have 128 rows of W each and share 256, 128 or 64 rows of
// x, of which each brings half to both (multicast). Both operands go through a ring in shared
// memory, 64 k a stage. Two warpgroups multiply 64 rows of W each by all the rows of x; a third
// feeds. Clusters go from tile to tile, so the ring is full when a tile begins. y's rows are
// columns of the sums and are turned in shared memory (large_tiles.cuh). Of a gated W the copy
// engine brings eight rows of gate and eight of up by turns, so both sums of an output meet in one
// thread.
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
  int m, n, k_blocks;  // of 64 k
  LargeTiles tiles;
  float alpha, beta;
  bool gated;
};

constexpr int kStageK = 64, kWRows = 128;  // of W, of a block
// Of x, a tile has 8 kGroups rows; of these at most 128 leave at a time.
template <int kGroups>
constexpr int kOutGroups = kGroups < 16 ? kGroups : 16;
template <int kGroups>
using DenseRing =
    LargeRing<8 * kGroups * 128, kWRows * 128, 8 * kOutGroups<kGroups> * kLargeRowBytes>;

// Feeds the ring of block `rank` of a cluster, by one thread.
template <int kGroups>
__device__ __forceinline__ void feed(const LargeArgs& args, const DenseRing<kGroups>& ring,
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
      if (k_block == 0 && tile == args.tiles.first()) ptx::pdl_wait();  // every cluster has a tile
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
      int before = 0;  // the stage that is multiplied last
#pragma unroll 1
      for (int k_block = 0; k_block < args.k_blocks; ++k_block) {
        ptx::mbarrier_wait(ring.full(stage), parity);
        const uint64_t w =
            ptx::wgmma_descriptor_swizzle128(ring.weights(stage) + warpgroup * 64 * 128);
        const uint64_t x = ptx::wgmma_descriptor_swizzle128(ring.rows(stage));
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageK / 16; ++step) {  // 32 bytes, in units of 16
          ptx::wgmma_64xNx16<T, kGroups>(sums, w + step * 2, x + step * 2, k_block + step > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (k_block > 0) ring.release(before, peer_empty);
        before = stage;
        Ring::advance(stage, parity);
      }
      ptx::wgmma_wait<0>();
      ring.release(before, peer_empty);
      const auto at = args.tiles.place(tile);
      const int column = (2 * at.w + rank) * kWRows + warpgroup * 64;
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
  run_large(ring, [&] { feed<kGroups>(args, ring, rank); }, multiply);
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

// The rows of x of a tile that should be quickest, by what a tile takes beside one of 256 rows:
// half and a quarter, and more for rows of W that are read as often (estimates; no bit of y
// changes).
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
