// y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y for 1 to 64 rows, 16-bit W.
//
// Roofline: W is read once, 2 N K bytes; at 3 TB/s a 4096 x 4096 matrix takes 11 us. x, y and the
// mma hide behind that stream if about 40 KB per SM are in flight.
//
// Schedule: a CTA owns 16 * kTiles rows of W.
//   8 warps   warp w takes k chunks w, w + 8, ... of 64 k, straight from memory into mma fragments
//             (16-byte loads, no shared memory), and refills a fragment right after its use
//   epilogue  the warps' sums are added in warp order through shared memory
// Nothing of this depends on M, so a row of y has the same bits whatever the batch. kTiles only
// moves rows of W between CTAs. tall_gemm.cu serves a W of very many rows.
//
// The surprising decision: the fragments have the "wrong" k. A lane loads 8 consecutive k of its
// row and passes them to mma.m16n8k16 as if they were the k of the fragment layout. x is loaded in
// the same order, so each weight meets its own x, and only the order of additions differs. That
// order is the same for every M.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/skinny_gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 64;  // inputs (k) in a chunk of a warp

using Args = SkinnyArgs;

// A lane's part of 16 rows of W x 64 k: rows g and g + 8, two times 8 consecutive k each.
struct WeightFragment {
  uint4 v[2][2];  // W of each [row half][k half]
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// ---- kernels

template <typename T,    // __half or __nv_bfloat16
          typename Out,  // T or float
          int kTiles,    // m16 tiles of W that a CTA has
          int kGroups,   // groups of 8 rows of x: M <= 8 * kGroups
          int kUnroll,   // chunks of a warp that are in flight
          int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks) skinny_gemm_kernel(const Args args) {
  __shared__ float partial[kWarps][8 * kGroups][16 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, q = lane % 4;
  const int n0 = blockIdx.x * 16 * kTiles;
  const T* x = static_cast<const T*>(args.x);
  const T* w = static_cast<const T*>(args.w);
  const uint64_t policy = ptx::evict_first_policy();

  // The lane's first element of W and of x; other tiles and groups are a fixed stride away.
  const T* w_lane = w + static_cast<int64_t>(n0 + g) * args.k + q * 8;
  const T* x_lane = x + static_cast<int64_t>(g) * args.k + q * 8;
  const int64_t stride = int64_t{8} * args.k;

  const auto load_weights = [&](WeightFragment& fragment, int tile, int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = w_lane + (tile * 2 + half) * stride + k0;
      const bool valid = n0 + tile * 16 + half * 8 + g < args.n;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        fragment.v[half][run] = valid && k0 + run * 32 + q * 8 < args.k
                                    ? ptx::load_stream16(from + run * 32, policy)
                                    : uint4{0, 0, 0, 0};
      }
    }
  };
  const auto load_rows = [&](uint4(&fragment)[2], int group, int k0) {
    const T* from = x_lane + group * stride + k0;
    const bool valid = group * 8 + g < args.m;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      fragment[run] = valid && k0 + run * 32 + q * 8 < args.k
                          ? *reinterpret_cast<const uint4*>(from + run * 32)
                          : uint4{0, 0, 0, 0};
    }
  };

  ptx::pdl_launch();
  WeightFragment weights[kUnroll][kTiles];
  const auto load_step = [&](int k0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_weights(weights[u][tile], tile, k0 + u * kWarps * kChunk);
      }
    }
  };
  load_step(warp * kChunk);  // W does not depend on earlier kernels
  ptx::pdl_wait();

  // Main loop over this warp's chunks.
  float sums[kTiles][kGroups][4] = {};
  for (int k0 = warp * kChunk; k0 < args.k; k0 += kUnroll * kWarps * kChunk) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint4 rows[2];
        load_rows(rows, group, k0 + u * kWarps * kChunk);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              const WeightFragment& f = weights[u][tile];
              const uint32_t a[4] = {word(f.v[0][run], 2 * pair), word(f.v[1][run], 2 * pair),
                                     word(f.v[0][run], 2 * pair + 1),
                                     word(f.v[1][run], 2 * pair + 1)};
              ptx::mma_16x8x16<T>(sums[tile][group], a, word(rows[run], 2 * pair),
                                  word(rows[run], 2 * pair + 1));
            }
          }
        }
      }
      // Refill the fragment just used: its loads are in flight while other chunks are multiplied.
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_weights(weights[u][tile], tile, k0 + (kUnroll + u) * kWarps * kChunk);
      }
    }
  }

  // Epilogue: add the warps' sums in order.
  Out* y = static_cast<Out*>(args.y);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile > 0) __syncthreads();  // all threads have read `partial`
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[warp][group * 8 + q * 2 + i % 2][g + i / 2 * 8] = sums[tile][group][i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 8 * kGroups; i += kThreads) {
      const int row = i / 16, n = n0 + tile * 16 + i % 16;
      if (row >= args.m || n >= args.n) continue;
      float sum = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) sum += partial[part][row][i % 16];
      const int64_t at = row * args.y_stride + n;
      float value = args.alpha * sum;
      if (args.beta != 0) value += args.beta * to_float(y[at]);
      y[at] = from_float<Out>(value);
    }
  }
}

// ---- launchers

template <typename T, typename Out, int kTiles, int kGroups, int kUnroll, int kMinBlocks>
void launch_skinny(const Context& ctx, const Args& args) {
  const int rows = 16 * kTiles;
  launch(ctx, skinny_gemm_kernel<T, Out, kTiles, kGroups, kUnroll, kMinBlocks>,
         dim3((args.n + rows - 1) / rows), dim3(kThreads), 0, args);
}

// Up to 64 rows. The more rows of x, the more rows of W per CTA, or x is read too often.
template <typename T, typename Out>
void skinny_block(const Context& ctx, const Args& args) {
  if (args.m <= 8) return launch_skinny<T, Out, 1, 1, 2, 3>(ctx, args);
  if (args.m <= 16) return launch_skinny<T, Out, 1, 2, 2, 3>(ctx, args);
  if (args.m <= 32) return launch_skinny<T, Out, 2, 4, 1, 1>(ctx, args);
  if (args.n >= 64 * 2 * ctx.sm_count) return launch_skinny<T, Out, 4, 8, 1, 1>(ctx, args);
  return launch_skinny<T, Out, 2, 8, 1, 1>(ctx, args);
}

}  // namespace

void skinny_gemm(const Context& ctx, const GemmParams& params) {
  check_gemm(params);
  const int64_t m = params.x.size(0), k = params.x.size(1), n = params.w.size(0);
  const int64_t y_stride = params.y_stride ? params.y_stride : n;
  const bool tall = is_tall(ctx, n);
  const int64_t most_rows = tall ? kMaxTallRows : kMaxSkinnyRows;
  for (int64_t row = 0; row < m; row += most_rows) {
    const int64_t rows = std::min(most_rows, m - row);
    const Args args{.y = params.y.as<char>() + row * y_stride * size_of(params.y.dtype()),
                    .x = params.x.rows(row, rows).data(),
                    .w = params.w.data(),
                    .m = static_cast<int>(rows),
                    .n = static_cast<int>(n),
                    .k = static_cast<int>(k),
                    .y_stride = y_stride,
                    .alpha = params.alpha,
                    .beta = params.beta};
    if (tall) {
      tall_gemm(ctx, params.x.dtype(), params.y.dtype(), args);
      continue;
    }
    dispatch_half(params.x.dtype(), [&](auto t) {
      using T = decltype(t);
      params.y.dtype() == DType::kF32 ? skinny_block<T, float>(ctx, args)
                                      : skinny_block<T, T>(ctx, args);
    });
  }
}

}  // namespace cpmcu::cuda
