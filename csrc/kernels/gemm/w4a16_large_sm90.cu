// w4_gemm of more rows than a decode step has, for Hopper: prefill with weights in 4 bits.
//
// Roofline: 2 M N K operations. At M = 2048 a layer of MiniCPM4-8B has 0.97 TFLOP, 1.4 ms at the
// 680 TFLOP/s that cuBLAS reaches in float16; its 124 MB of weights, read once, take 0.04.
//
// The surprising decision: y has the bits that w4_gemm's other kernels give, whatever M is. q - z
// times x is added up exactly as there: 16 k in an instruction, eight of those for a group, the sum
// of a group times its scale in float32, groups and slices of K in order. So prompts may be cut
// into chunks of any length, and nothing is dequantised to memory, which alone took longer than 256
// rows take now.
//
// Work: two blocks of threads, a cluster, have a tile of 256 rows of W and 128 (or 64) of x: half
// of each packed block each, and of the rows of x half is brought by each, to both, since L2 has
// not the bandwidth to give them twice. A block's two warpgroups multiply 64 rows of W each, which
// they unpack in registers, by the rows of x in shared memory; a third feeds. Clusters go from tile
// to tile, so the ring is full when a tile begins. Where K is cut into slices, the sum of those
// before waits in shared memory. y goes through shared memory, too: its rows are columns of the
// sums. Two accumulators of 128 columns fit into registers, so scales cost a product in 16 of the
// tensor cores' cycles and unpacking one in 8: that, not memory, is what is left (74 % of peak).
#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/large_tiles.cuh"
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/gemm/w4a16_sums.cuh"
#include "kernels/gemm/w4a16_wgmma.cuh"

namespace cpmcu::cuda {
namespace {

// Of half of a packed block, 128 rows of W, beside which there is room for zero points.
constexpr int kHalfRows = kW4BlockRows / 2, kHalfWords = kScaleOffset / 2;
constexpr int kHalfScales = 2 * kHalfRows, kHalfZeros = kHalfRows;
constexpr int kHalfBytes = kHalfWords + 512;
static_assert(kHalfScales + kHalfZeros <= 512);

// Of tiles of 8 kGroups rows of x. Behind the stages are a warpgroup's float32 sums while slices
// are multiplied, and then rows of y.
template <int kGroups>
struct W4LargeRing : LargeRing<8 * kGroups * kRowBytes, kHalfBytes, kGroups * 128 * 16> {
  using Base = LargeRing<8 * kGroups * kRowBytes, kHalfBytes, kGroups * 128 * 16>;
  using Base::Base;
  static constexpr int kRows = 8 * kGroups;  // of x
  static constexpr int kXBytes = kRows * kRowBytes;
  static_assert(kRows * kLargeRowBytes <= kGroups * 128 * 16);

  __device__ __forceinline__ uint32_t words(int stage) const { return Base::weights(stage); }
  __device__ __forceinline__ uint32_t scales(int stage) const { return words(stage) + kHalfWords; }
  __device__ __forceinline__ uint32_t zeros(int stage) const { return scales(stage) + kHalfScales; }
};

// Feeds the ring of block `rank` of a cluster, by one thread: its half of packed blocks, and half
// of the rows of x for both. The first weights come before x is there.
template <bool kZeros, int kGroups>
__device__ __forceinline__ void feed_large(const Args& args, const W4LargeRing<kGroups>& ring,
                                           const LargeTiles& tiles, int rank) {
  using Ring = W4LargeRing<kGroups>;
  constexpr int kXRows = Ring::kRows / 2;
  constexpr int kComes = kHalfWords + kHalfScales + (kZeros ? kHalfZeros : 0);
  const uint64_t policy = ptx::evict_first_policy();
  const auto feed_weights = [&](int stage, int tile, int k_block) {
    const char* block = args.blocks + (int64_t{tile} * args.k_blocks + k_block) * args.block_bytes;
    const auto copy = [&](uint32_t to, int offset, int bytes) {
      ptx::bulk_copy(to, block + offset + rank * bytes, bytes, ring.full(stage), policy);
    };
    ptx::mbarrier_expect_bytes(ring.full(stage), Ring::kXBytes + kComes);
    copy(ring.words(stage), 0, kHalfWords);
    copy(ring.scales(stage), kScaleOffset, kHalfScales);
    if constexpr (kZeros) copy(ring.zeros(stage), kZeroOffset, kHalfZeros);
  };
  const auto feed_rows = [&](int stage, int tile, int k_block) {
    if (k_block >= args.blocks_of_digit) k_block -= args.blocks_of_digit;
    const uint32_t to = ring.rows(stage) + rank * kXRows * 128;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      ptx::tensor_multicast(to + panel * Ring::kRows * 128, &args.x_map,
                            k_block * kW4BlockK + panel * 64, tile * Ring::kRows + rank * kXRows,
                            ring.full(stage), 0b11);
    }
  };

  ptx::prefetch_map(&args.x_map);
  const auto first = tiles.place(tiles.first());
  const int early = min(args.k_blocks, Ring::kStages);
  for (int i = 0; i < early; ++i) feed_weights(i, first.w, i);
  ptx::pdl_wait();
  for (int i = 0; i < early; ++i) feed_rows(i, first.x, i);
  int stage = early % Ring::kStages, parity = early / Ring::kStages;
#pragma unroll 1
  for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
    const auto at = tiles.place(tile);
#pragma unroll 1
    for (int k_block = tile == tiles.first() ? early : 0; k_block < args.k_blocks; ++k_block) {
      ptx::mbarrier_wait(ring.empty(stage), parity ^ 1);
      feed_weights(stage, at.w, k_block);
      feed_rows(stage, at.x, k_block);
      Ring::advance(stage, parity);
    }
  }
}

// Adds to `sums` those that lie in shared memory, as a block of w4_gemm's clusters adds up slices;
// unless this is the last slice, leaves them there and clears them.
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

template <typename T, int kGroups, bool kZeros>
__global__ void __launch_bounds__(kLargeThreads, 1)
    w4_large_kernel(const __grid_constant__ Args args, int x_tiles) {
  using Ring = W4LargeRing<kGroups>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  const Ring ring(shared, barriers);
  const LargeTiles tiles{args.tiles, x_tiles};
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32, rank = blockIdx.x % 2;
  // A warp's 16 of the warpgroup's 64 rows of W are one of the two tiles of a slab.
  const int warpgroup = warp / 4, slab = warp / 2;
  const bool second = warp % 2 != 0;
  const int row = slab * kSlabRows + second * 16 + lane / 4;

  const auto multiply = [&] {
    const uint32_t peer_empty = ptx::cluster_address(ring.empty(0), rank ^ 1);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
      float sums[kGroups][4] = {};
      int slice = 0, left_of_slice = args.slice_blocks + (args.longer_slices > 0);
#pragma unroll 1
      for (int left = args.k_blocks; left > 0; --left) {
        ptx::mbarrier_wait(ring.full(stage), parity);
        float scale[2];
        int zero[2] = {8, 8};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scale[half] = load_scale(ring.scales(stage) + 2 * (row + half * 8), args.bf16_scales);
          if constexpr (kZeros) {
            zero[half] = ptx::load_shared_byte(ring.zeros(stage) + row + half * 8);
          }
        }
        const uint32_t low = low_offset<T>(zero[0]), high = high_offset<T>(zero[1], zero[0]);
        uint32_t words[4][2];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const uint4 both = ptx::load_shared16(ring.words(stage) + slab * kSlabBytes +
                                                pair * kPairBytes + lane * 16);
          words[pair][0] = second ? both.y : both.x;
          words[pair][1] = second ? both.w : both.z;
        }
        float part[1][kGroups][4];
        WgmmaOf<1>::multiply_fragments<T, kGroups>(
            part, ring.rows(stage),
            [&](uint32_t (&a)[4], int pair, int step, int) {
              unpack<T>(a, words[pair][step], low, high);
            },
            [] {});
        ring.release(stage, peer_empty);
        Ring::advance(stage, parity);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[group][i] = __fmaf_rn(scale[i / 2], part[0][group][i], sums[group][i]);
          }
        }
        if (--left_of_slice == 0 && args.slices > 1) {
          add_slice(sums, ring.out(warpgroup), slice == 0, left == 1);
          left_of_slice = args.slice_blocks + (++slice < args.longer_slices);
        }
      }
      const auto at = tiles.place(tile);
      const int n0 = at.w * kW4BlockRows + rank * kHalfRows + warpgroup * 64;
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
  run_large(ring, [&] { feed_large<kZeros>(args, ring, tiles, rank); }, multiply);
}

// ---- launchers

template <typename T, int kGroups, bool kZeros>
void launch_large(const Context& ctx, DType dtype, Args args) {
  using Ring = W4LargeRing<kGroups>;
  const auto kernel = w4_large_kernel<T, kGroups, kZeros>;
  const int x_tiles = (args.m + Ring::kRows - 1) / Ring::kRows;
  const int clusters = std::min(ctx.sm_count / 2, args.tiles * x_tiles);
  args.x_map = make_map(args.x, args.m, args.k, dtype, Ring::kRows / 2);
  args.alpha /= kUnpackedScale<T>;
  args.slice_blocks = args.k_blocks / args.slices;
  args.longer_slices = args.k_blocks % args.slices;
  allow_shared_bytes(kernel, Ring::kBytes);
  launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kLargeThreads), Ring::kBytes, args,
                 x_tiles);
}

// Microseconds of a product in tiles of so many rows of x, and by the other kernels, 64 rows a
// pass, as an H100 takes them: which is quicker changes no bit of y.
double time_of_tiles(const Context& ctx, const Args& args, int rows) {
  const int clusters = ctx.sm_count / 2, tiles = args.tiles * ((args.m + rows - 1) / rows);
  return 3 + (rows == 64 ? 0.55 : 0.8) * args.k_blocks * ((tiles + clusters - 1) / clusters);
}
double time_of_passes(const Args& args) {
  const int blocks = args.tiles * args.k_blocks;
  const double pass = args.slices > 1 ? 5 + 0.0078 * blocks : 2.5 + 0.0068 * blocks;
  return pass * ((args.m + kMaxRows - 1) / kMaxRows);
}

}  // namespace

// Returns whether it has launched the product: not if the others are quicker.
bool w4_gemm_large_sm90(const Context& ctx, DType dtype, const void* of) {
  const Args& args = *static_cast<const Args*>(of);
  const double by_64 = time_of_tiles(ctx, args, 64), by_128 = time_of_tiles(ctx, args, 128);
  if (time_of_passes(args) < std::min(by_64, by_128)) return false;
  const bool zeros = args.block_bytes > kZeroOffset;
  dispatch_half(dtype, [&](auto t) {
    dispatch_int<8, 16>("groups of rows", by_64 < by_128 ? 8 : 16, [&](auto groups) {
      using T = decltype(t);
      constexpr int kGroups = decltype(groups)::value;
      zeros ? launch_large<T, kGroups, true>(ctx, dtype, args)
            : launch_large<T, kGroups, false>(ctx, dtype, args);
    });
  });
  return true;
}

}  // namespace cpmcu::cuda
