// packed_gemm on Hopper for more rows than a decode step has: y = alpha * x W^T + beta * y, W in
// weight blocks, any M.
//
// Roofline: 2 M N K operations. At M = 2048 a layer of MiniCPM4-8B has 0.97 TFLOP: 1.4 ms at the
// 680 TFLOP/s that cuBLAS reaches in float16. Its 124 MB of int4 take 0.04 ms. The kernel
// reaches 74 % of the peak: beside each wgmma (64 tensor core cycles) a warp issues 8 instructions
// to unpack and 8 to scale.
//
// Schedule: persistent clusters of two CTAs; a tile is 256 rows of W x 128 (or 64) rows of x.
//                  CTA 0: rows 0-127 of W   CTA 1: rows 128-255 of W
//   producer       its half of a weight block; half of the rows of x, multicast to both CTAs
//   2 warpgroups   unpack 64 rows of W in registers, wgmma, scale into float32 sums
//   slices of K    shared memory keeps the sum of the previous slices
//   epilogue       the rows of y are columns of the sums; transposed in shared memory
//
// The surprising decision: y has the bits of packed_gemm's other kernels, whatever M. The order of
// additions is the same: 16 k in an instruction, up to eight instructions in a group, the group's
// sum times its scale in float32, then groups and slices in order. So a prompt may be cut into
// chunks of any length. No weight is dequantised to memory: that step alone took longer than this
// kernel takes for 256 rows.
#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/packed/large.cuh"
#include "kernels/gemm/packed/sums.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

// The area behind the stages holds a warpgroup's float32 sums between slices, and then rows of y.
template <typename Unpacker, int kGroups>
using SliceRing = PackedLargeRing<Unpacker, kGroups, kGroups * 128 * 16>;

// Producer thread of CTA `rank` of a cluster. The first weights are loaded before x is there.
template <typename Unpacker, int kGroups>
__device__ __forceinline__ void produce_large(const PackedGemmArgs& args,
                                              const SliceRing<Unpacker, kGroups>& ring,
                                              const LargeTiles& tiles, int rank) {
  using Ring = SliceRing<Unpacker, kGroups>;
  const uint64_t policy = ptx::evict_first_policy();
  const auto produce_weights = [&](int stage, int tile, int k_block) {
    const char* block = args.blocks + (int64_t{tile} * args.k_blocks + k_block) * args.block_bytes;
    copy_half_block<Unpacker>(ring, stage, block, rank, args.scale_form, policy);
  };
  const auto produce_rows = [&](int stage, int tile, int k_block) {
    if (k_block >= args.plane_k_blocks) k_block -= args.plane_k_blocks;
    copy_half_rows(ring, stage, &args.x_map, tile * Ring::kRows, k_block, rank);
  };

  ptx::prefetch_map(&args.x_map);
  const auto first = tiles.place(tiles.first());
  const int early = min(args.k_blocks, Ring::kStages);
  for (int i = 0; i < early; ++i) produce_weights(i, first.w, i);
  ptx::pdl_wait();
  for (int i = 0; i < early; ++i) produce_rows(i, first.x, i);
  int stage = early % Ring::kStages, parity = early / Ring::kStages;
#pragma unroll 1
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
    const auto at = tiles.place(tile);
#pragma unroll 1
    for (int k_block = tile == tiles.first() ? early : 0; k_block < args.k_blocks; ++k_block) {
      ptx::mbarrier_wait(ring.empty(stage), parity ^ 1);
      produce_weights(stage, at.w, k_block);
      produce_rows(stage, at.x, k_block);
      Ring::advance(stage, parity);
    }
  }
}

// Adds the sums in shared memory to `sums`, in the order in which a cluster of packed_gemm adds
// slices. Unless this is the last slice, stores the result there and clears `sums`.
template <int kGroups>
__device__ __forceinline__ void add_slice(float (&sums)[kGroups][4], uint32_t shared, bool first,
                                          bool last) {
  const uint32_t mine = shared + threadIdx.x % 128 * 16;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint32_t at = mine + group * 128 * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (!first) v = ptx::load_shared16(at);
    float (&sum)[4] = sums[group];
    sum[0] = __fadd_rn(__uint_as_float(v.x), sum[0]);
    sum[1] = __fadd_rn(__uint_as_float(v.y), sum[1]);
    sum[2] = __fadd_rn(__uint_as_float(v.z), sum[2]);
    sum[3] = __fadd_rn(__uint_as_float(v.w), sum[3]);
    if (last) continue;
    ptx::store_shared16(at, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0;
  }
}

// ---- kernels

template <typename T, int kGroups, typename Unpacker>
__global__ void __launch_bounds__(kLargeThreads, 1)
    packed_large_kernel(const __grid_constant__ PackedGemmArgs args, int x_tiles) {
  using Ring = SliceRing<Unpacker, kGroups>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  const Ring ring(shared, barriers);
  const LargeTiles tiles{args.tiles, x_tiles};
  const int warpgroup = ptx::uniform_warp() / 4, rank = blockIdx.x % 2;

  const auto multiply = [&] {
    const uint32_t peer_empty = ptx::cluster_address(ring.empty(0), rank ^ 1);
    const HalfBlockRows rows;
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      float sums[kGroups][4] = {};
      int slice = 0, left_of_slice = args.slice_blocks + (args.longer_slices > 0);
#pragma unroll 1
      for (int left = args.k_blocks; left > 0; --left) {
        ptx::mbarrier_wait(ring.full(stage), parity);
        add_half_block<T, Unpacker>(sums, ring, stage, rows, args.scale_form, peer_empty);
        Ring::advance(stage, parity);
        if (--left_of_slice == 0 && args.slices > 1) {
          add_slice(sums, ring.out(warpgroup), slice == 0, left == 1);
          left_of_slice = args.slice_blocks + (++slice < args.longer_slices);
        }
      }
      const auto at = tiles.place(tile);
      const int n0 = at.w * kPackedRows + rank * kHalfRows + warpgroup * 64;
      const int width = args.gated ? args.n / 2 : args.n;
      const LargeOut<T> out(args.y, width, width, args.m, args.beta != 0);
      const auto update = [&](float sum, float old) { return updated(args, sum, old); };
      if (args.gated) {
        out.store_gated(sums, ring.out(warpgroup), warpgroup, at.x * Ring::kRows, n0 / 2,
                        [&](float gate, float up) { return gated_value(args, gate, up); });
      } else {
        out.store(sums, ring.out(warpgroup), warpgroup, at.x * Ring::kRows, n0, update);
      }
    }
  };
  run_large(ring, [&] { produce_large<Unpacker>(args, ring, tiles, rank); }, multiply);
}

// ---- launchers

template <typename T, int kGroups, typename Unpacker>
void launch_large(const Context& ctx, DType dtype, PackedGemmArgs args) {
  using Ring = SliceRing<Unpacker, kGroups>;
  const auto kernel = packed_large_kernel<T, kGroups, Unpacker>;
  const int x_tiles = (args.m + Ring::kRows - 1) / Ring::kRows;
  const int clusters = std::min(ctx.sm_count / 2, args.tiles * x_tiles);
  args.x_map = make_map(args.x, args.m, args.k, dtype, Ring::kRows / 2);
  args.alpha /= Unpacker::template kFactor<T>;
  args.slice_blocks = args.k_blocks / args.slices;
  args.longer_slices = args.k_blocks % args.slices;
  allow_shared_bytes(kernel, Ring::kBytes);
  launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kLargeThreads), Ring::kBytes, args,
                 x_tiles);
}

// Estimated microseconds on an H100: first this kernel with tiles of `rows` rows of x, then the
// other kernels with 64 rows a pass. The choice changes no bit of y.
double time_of_tiles(const Context& ctx, const PackedGemmArgs& args, int rows) {
  const int clusters = ctx.sm_count / 2, tiles = args.tiles * ((args.m + rows - 1) / rows);
  return 3 + (rows == 64 ? 0.55 : 0.8) * args.k_blocks * ((tiles + clusters - 1) / clusters);
}
double time_of_passes(const PackedGemmArgs& args) {
  const int blocks = args.tiles * args.k_blocks;
  const double pass = args.slices > 1 ? 5 + 0.0078 * blocks : 2.5 + 0.0068 * blocks;
  return pass * ((args.m + kMaxRows - 1) / kMaxRows);
}

}  // namespace

// Returns whether it launched the GEMM; false if the other kernels are faster.
bool packed_gemm_large_sm90(const Context& ctx, const PackedLayout& layout, DType dtype,
                            const PackedGemmArgs& args) {
  const double by_64 = time_of_tiles(ctx, args, 64), by_128 = time_of_tiles(ctx, args, 128);
  if (time_of_passes(args) < std::min(by_64, by_128)) return false;
  dispatch_half(dtype, [&](auto t) {
    const int groups = by_64 < by_128 || has_small_tiles(layout) ? 8 : 16;
    dispatch_int<8, 16>("groups of rows", groups, [&](auto constant) {
      using T = decltype(t);
      constexpr int kGroups = decltype(constant)::value;
      dispatch_unpacker(layout, [&](auto unpacker) {
        using Unpacker = decltype(unpacker);
        if constexpr (kGroups == 8 || !kHasSmallTiles<Unpacker>) {
          launch_large<T, kGroups, Unpacker>(ctx, dtype, args);
        }
      });
    });
  });
  return true;
}

}  // namespace cpmcu::cuda
