// skinny_gemm of a W of very many rows (lm_head): y [M, N] = alpha * x W^T + beta * y, M up to
// kMaxTallRows.
//
// Roofline: W is read once, 2 N K bytes. MiniCPM4's lm_head, 0.6 GB, takes 197 us at 3.05 TB/s. On
// Hopper the short-lived CTAs of skinny_gemm.cu take 204 us at one row (254 in a step) and 256 us
// at 32 rows, because each reads all of x for 32 rows of W. This kernel makes a step 54 us shorter.
//
// Schedule: one CTA per SM.
//   weight producer  64 k of a tile of W -> a stage; does not wait for x
//   row producer     64 k of the rows of x -> the same stage
//   8 consumer warps mma.sync, 16 rows of W each; a sum goes through k in order, whatever M
// From compute capability 9.0 on, a producer is one thread that issues TMA copies. Before, it is a
// warp that issues cp.async.
//
// The surprising decision: rows of W are divided among SMs before they are cut into tiles. Each SM
// gets one contiguous range, a multiple of 16 rows. It cuts the range into equal tiles of up to 128
// rows, and the tensor map has boxes of that size. If the 73448 rows of MiniCPM4 had tiles of 128,
// two thirds of an H100 would be idle in the last of five rounds.
#include "core/dispatch.h"
#include "core/launch.h"
#include "core/vec.cuh"
#include "kernels/gemm/dense_mma.cuh"
#include "kernels/gemm/skinny_gemm.h"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kTileRows = 16 * kWarps;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasEngine = true;  // TMA
#else
constexpr bool kHasEngine = false;
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasAllStages = true;  // shared memory has room for kMaxStages
#else
constexpr bool kHasAllStages = false;
#endif
constexpr int kArrivalsOfCopies = kHasEngine ? 1 : 32;  // arrivals at the barrier of a stage

struct TallArgs {
  // For TMA, 64 k a box; tile_map: all tiles of a CTA but the last, last_map: the last
  TensorMap x_map, tile_map, last_map;
  void* y;        // [M, N]
  const char* x;  // [M, K]
  const char* w;  // [N, K]
  int m, n, k, k_blocks;
  int stages;
  int cta_rows;              // rows of W of a CTA, a multiple of 16
  int tile_rows, last_rows;  // rows of W of a tile
  int64_t y_stride;
  float alpha, beta;
};

// Stages of rows of x and, behind them, a tile of W. Barriers: rows_in and weights_in (data has
// arrived), done (all consumer warps are done with the stage).
template <int kGroups>
struct TallRing {
  static constexpr int kXBytes = 8 * kGroups * kDenseRowBytes;
  static constexpr int kStageBytes = kXBytes + kTileRows * kDenseRowBytes;
  static constexpr int kMaxStages = kRingBytes / kStageBytes;
  uint32_t data, barriers;
  int stages, stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t rows() const { return data + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t weights() const { return rows() + kXBytes; }
  __device__ __forceinline__ uint32_t rows_in() const { return barriers + 24 * stage; }
  __device__ __forceinline__ uint32_t weights_in() const { return rows_in() + 8; }
  __device__ __forceinline__ uint32_t done() const { return rows_in() + 16; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Calls f(first row of W, number of rows) for each tile of this CTA.
template <typename F>
__device__ __forceinline__ void each_tile(const TallArgs& args, F f) {
  const int begin = blockIdx.x * args.cta_rows;
  const int end = min(begin + args.cta_rows, args.n);
#pragma unroll 1
  for (int row = begin; row < end; row += args.tile_rows) {
    f(row, row + args.last_rows == begin + args.cta_rows ? args.last_rows : args.tile_rows);
  }
}

// Copies 64 k of `rows` rows of a matrix [rows, k] into a stage, swizzled as make_map's boxes are.
// By a warp, with cp.async. Elements beyond K become zero.
[[maybe_unused]] __device__ __forceinline__ void copy_box(uint32_t to, const char* matrix, int rows,
                                                          int k, int k_block, uint32_t barrier) {
  const int chunk = threadIdx.x % 8, first = threadIdx.x % 32 / 8;
  const int column = k_block * kDenseK + chunk * 8;
  const int64_t row_bytes = int64_t{2} * k;
  const bool valid = column < k;
  // A row that is 8 further has the same place in the swizzle.
  const int places[2] = {first * kDenseRowBytes + ((chunk ^ first) << 4),
                         (first + 4) * kDenseRowBytes + ((chunk ^ (first + 4)) << 4)};
  const char* from = matrix + first * row_bytes + (valid ? column * 2 : 0);
#pragma unroll 4
  for (int row = first; row < rows; row += 8) {
    ptx::cp_async16(to + places[0], from, valid);
    if (row + 4 < rows) ptx::cp_async16(to + places[1], from + 4 * row_bytes, valid);
    from += 8 * row_bytes;
    to += 8 * kDenseRowBytes;
  }
  ptx::mbarrier_arrive_cp_async(barrier);
}

// Weight producer.
template <typename Ring>
__device__ __forceinline__ void produce_weights(const TallArgs& args, Ring ring) {
  [[maybe_unused]] const uint64_t policy = ptx::evict_first_policy();
  each_tile(args, [&](int row, int rows) {
    [[maybe_unused]] const TensorMap* map =
        rows == args.tile_rows ? &args.tile_map : &args.last_map;
    // Rows beyond N are not copied. Their sums are not stored.
    [[maybe_unused]] const int copied = min(rows, args.n - row);
#pragma unroll 1
    for (int k_block = 0; k_block < args.k_blocks; ++k_block, ring.next()) {
      ptx::mbarrier_wait(ring.done(), ring.parity ^ 1);
      if constexpr (kHasEngine) {
        ptx::mbarrier_expect_bytes(ring.weights_in(), rows * kDenseRowBytes);
        ptx::tensor_copy(ring.weights(), map, k_block * kDenseK, row, ring.weights_in(), policy);
      } else {
        copy_box(ring.weights(), args.w + int64_t{2} * row * args.k, copied, args.k, k_block,
                 ring.weights_in());
      }
    }
  });
}

// Row producer.
template <typename Ring>
__device__ __forceinline__ void produce_rows(const TallArgs& args, Ring ring) {
  each_tile(args, [&](int, int) {
#pragma unroll 1
    for (int k_block = 0; k_block < args.k_blocks; ++k_block, ring.next()) {
      ptx::mbarrier_wait(ring.done(), ring.parity ^ 1);
      if constexpr (kHasEngine) {
        ptx::mbarrier_expect_bytes(ring.rows_in(), Ring::kXBytes);
        ptx::tensor_copy(ring.rows(), &args.x_map, k_block * kDenseK, 0, ring.rows_in());
      } else {
        copy_box(ring.rows(), args.x, args.m, args.k, k_block, ring.rows_in());
      }
    }
  });
}

template <typename T, typename Out, int kGroups>  // M <= 8 * kGroups
__global__ void __launch_bounds__(kThreads + 64, 1)
    tall_gemm_kernel(const __grid_constant__ TallArgs args) {
  using Ring = TallRing<kGroups>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[3 * Ring::kMaxStages];
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  const int stages = kHasAllStages ? Ring::kMaxStages : args.stages;
  Ring ring{ptx::shared_address(shared), ptx::shared_address(barriers), stages};

  ptx::pdl_launch();
  if (ptx::is_elected()) {  // all warps share the work: a barrier costs 30 to 40 cycles
#pragma unroll 1
    for (int i = warp; i < stages; i += kThreads / 32 + 2) {
      const Ring mine{ring.data, ring.barriers, stages, i};
      ptx::mbarrier_init(mine.rows_in(), kArrivalsOfCopies);
      ptx::mbarrier_init(mine.weights_in(), kArrivalsOfCopies);
      ptx::mbarrier_init(mine.done(), kThreads);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const auto is_producer = [&](int number) {
    return warp == kWarps + number && (!kHasEngine || lane == 0);
  };
  if (is_producer(0)) produce_weights(args, ring);
  ptx::pdl_wait();
  if (is_producer(1)) produce_rows(args, ring);
  if (warp >= kWarps) {
    if constexpr (!kHasEngine) {  // no copies may be in flight when a warp ends
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
    return;
  }

  // Consumers: main loop over K, then the epilogue, for each tile.
  const LaneRows<kGroups> lane_rows;
  const uint32_t lane_weights = dense_row_offset(warp * 16 + lane % 16);
  Out* const y = static_cast<Out*>(args.y);
  each_tile(args, [&](int first, int rows) {
    const bool has_rows = warp * 16 < rows;
    float sums[1][kGroups][4] = {};
#pragma unroll 1
    for (int k_block = 0; k_block < args.k_blocks; ++k_block, ring.next()) {
      ptx::mbarrier_wait(ring.rows_in(), ring.parity);
      ptx::mbarrier_wait(ring.weights_in(), ring.parity);
      if (has_rows) {
        accumulate_dense<T, 1, kGroups>(sums, ring.rows(), {ring.weights() + lane_weights},
                                        lane_rows);
      }
      ptx::mbarrier_arrive(ring.done());
    }
    if (!has_rows) return;
    const int n = first + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = n + i / 2 % 2 * 8;
      if (row >= args.m || column >= args.n) continue;
      Out& to = y[row * args.y_stride + column];
      float value = args.alpha * sums[0][i / 4][i % 4];
      if (args.beta != 0) value += args.beta * to_float(to);
      to = from_float<Out>(value);
    }
  });
}

// ---- launchers

template <typename T, typename Out, int kGroups>
void launch_tall(const Context& ctx, TallArgs args) {
  using Ring = TallRing<kGroups>;
  args.stages = std::min(Ring::kMaxStages, ring_bytes(ctx) / Ring::kStageBytes);
  const auto kernel = tall_gemm_kernel<T, Out, kGroups>;
  const int shared_bytes = args.stages * Ring::kStageBytes;
  allow_shared_bytes(kernel, shared_bytes);
  launch(ctx, kernel, dim3((args.n + args.cta_rows - 1) / args.cta_rows), dim3(kThreads + 64),
         shared_bytes, args);
}

}  // namespace

void tall_gemm(const Context& ctx, DType x, DType y, const SkinnyArgs& args) {
  const int groups = row_groups(args.m, kMaxTallRows);
  const auto up_to_16 = [](int rows) { return (rows + 15) / 16 * 16; };
  const int cta_rows = up_to_16((args.n + ctx.sm_count - 1) / ctx.sm_count);
  const int tiles = (cta_rows + kTileRows - 1) / kTileRows;
  const int tile_rows = up_to_16((cta_rows + tiles - 1) / tiles);
  TallArgs tall{.y = args.y,
                .x = static_cast<const char*>(args.x),
                .w = static_cast<const char*>(args.w),
                .m = args.m,
                .n = args.n,
                .k = args.k,
                .k_blocks = (args.k + kDenseK - 1) / kDenseK,
                .cta_rows = cta_rows,
                .tile_rows = tile_rows,
                .last_rows = cta_rows - (tiles - 1) * tile_rows,
                .y_stride = args.y_stride,
                .alpha = args.alpha,
                .beta = args.beta};
  if (ctx.code_capability >= 90) {
    tall.x_map = make_map(args.x, args.m, args.k, x, 8 * groups);
    tall.tile_map = make_map(args.w, args.n, args.k, x, tall.tile_rows);
    tall.last_map = make_map(args.w, args.n, args.k, x, tall.last_rows);
  }
  dispatch_half(x, [&](auto t) {
    using T = decltype(t);
    dispatch_int<1, 2, 4, 8, 16>("groups of rows", groups, [&](auto constant) {
      constexpr int kGroups = decltype(constant)::value;
      y == DType::kF32 ? launch_tall<T, float, kGroups>(ctx, tall)
                       : launch_tall<T, T, kGroups>(ctx, tall);
    });
  });
}

}  // namespace cpmcu::cuda
