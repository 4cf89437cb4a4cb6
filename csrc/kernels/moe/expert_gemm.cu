// expert_gemm: y[p] = x[row of p] W[expert of p]^T with 16-bit W [E, N, K], or with SiLU.
//
// Roofline: the W of each chosen expert is read once, 2 N K bytes. One token of a 30B-A3B layer
// has 8 experts: gate and up 50 MB, 16 us at 3 TB/s; down 25 MB, 8 us.
//
// Schedule: a CTA owns 32 rows of W of one expert with pairs.
//   8 warps   warp w takes k chunks w, w + 8, ... of 64 k, straight from memory into mma fragments,
//             and multiplies them with up to 8 or 32 pairs of the expert
//   epilogue  expert_tiles.cuh
// If an expert has more pairs, its W is read again, from L2. The number of pairs only decides which
// groups are left out, so a pair's bits do not depend on the other pairs.
//
// The surprising decision: as in skinny_gemm.cu, a lane passes 8 consecutive k of its row to the
// mma as if they were the k of the fragment layout. x is loaded in the same order.
#include "core/ptx.cuh"
#include "kernels/moe/expert_tiles.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kChunk = 64;     // inputs (k) in a chunk of a warp
constexpr int kSplitBits = 3;  // log2 of the warps that share K: all warps do

// A lane's part of 16 rows of W x 64 k: rows g and g + 8, two times 8 consecutive k each.
struct WeightFragment {
  uint4 v[2][2];  // W of each [row half][k half]
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// ---- kernels

template <typename T,   // __half or __nv_bfloat16
          int kGroups,  // groups of 8 pairs that are multiplied at a time
          int kUnroll,  // chunks of a warp that are in flight
          int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks) expert_gemm_kernel(const ExpertArgs args) {
  extern __shared__ float partial[];
  if (!args.routing_is_complete) ptx::pdl_wait();
  const ExpertSpan span = span_of(args);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const T* w = reinterpret_cast<const T*>(args.w + span.expert * args.stride) + q * 8;
  const T* x = static_cast<const T*>(args.x) + q * 8;
  const uint64_t policy = ptx::evict_first_policy();

  // The lane's rows of W, in each m16 tile; null beyond W.
  const T* w_rows[2][2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_part = (blockIdx.x * 2 + tile) * 8 + g;  // row of W within gate or within up
      const int row =
          args.gated ? in_part + half * args.width : (blockIdx.x * 2 + tile) * 16 + half * 8 + g;
      const bool valid = args.gated ? in_part < args.width : row < args.n;
      w_rows[tile][half] = valid && span.count > 0 ? w + int64_t{row} * args.k : nullptr;
    }
  }

  const auto load_weights = [&](WeightFragment& fragment, int tile, int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = w_rows[tile][half];
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const int k = k0 + run * 32;
        fragment.v[half][run] = row != nullptr && k + q * 8 < args.k
                                    ? ptx::load_stream16(row + k, policy)
                                    : uint4{0, 0, 0, 0};
      }
    }
  };

  WeightFragment weights[kUnroll][2];
  const auto load_step = [&](int u, int k0) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      load_weights(weights[u][tile], tile, k0 + u * kWarps * kChunk);
    }
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load_step(u, warp * kChunk);
  if (args.routing_is_complete) ptx::pdl_wait();
  ptx::pdl_launch();

  for (int first = 0; first < span.count; first += 8 * kGroups) {
    const PairRows<kGroups> rows(args, span, first);
    if (first > 0) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load_step(u, warp * kChunk);
    }
    // Main loop over this warp's chunks.
    float sums[2][kGroups][4] = {};
    for (int k0 = warp * kChunk; k0 < args.k; k0 += kUnroll * kWarps * kChunk) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int k_chunk = k0 + u * kWarps * kChunk;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (!rows.has(group)) continue;
          uint4 of_x[2];
#pragma unroll
          for (int run = 0; run < 2; ++run) {
            const int k = k_chunk + run * 32;
            of_x[run] = k + q * 8 < args.k
                            ? *reinterpret_cast<const uint4*>(x + rows.rows[group] + k)
                            : uint4{0, 0, 0, 0};
          }
#pragma unroll
          for (int run = 0; run < 2; ++run) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
              for (int tile = 0; tile < 2; ++tile) {
                const WeightFragment& f = weights[u][tile];
                const uint32_t a[4] = {word(f.v[0][run], 2 * pair), word(f.v[1][run], 2 * pair),
                                       word(f.v[0][run], 2 * pair + 1),
                                       word(f.v[1][run], 2 * pair + 1)};
                ptx::mma_16x8x16<T>(sums[tile][group], a, word(of_x[run], 2 * pair),
                                    word(of_x[run], 2 * pair + 1));
              }
            }
          }
        }
        load_step(u, k0 + kUnroll * kWarps * kChunk);  // in flight while others are multiplied
      }
    }
    const T* const bias =
        static_cast<const T*>(args.bias) + int64_t{span.expert} * args.n + blockIdx.x * kTileRows;
    store_pairs<T, kGroups>(args, rows, sums, partial, bias);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads the experts' pairs from the device.
void expert_gemm(const Context& ctx, const ExpertGemmParams& p) {
  check_expert_gemm(p);
  if (p.rows.y.size(0) == 0) return;
  const int64_t n = p.w.size(1);
  // Few tokens: an expert has few pairs, so one group at a time.
  const bool few = p.rows.y.size(0) / p.rows.routing.top_k <= 8;
  ExpertArgs args = expert_args("expert_gemm", p.rows, n, kSplitBits, p.gated, few ? 8 : 32);
  CHECK(is_aligned16(p.w.data()), "expert_gemm: w is not aligned to 16 bytes");
  args.w = p.w.as<const char>();
  args.stride = n * p.w.size(2) * size_of(p.w.dtype());
  const dim3 grid = expert_grid(p.rows, n, kSplitBits);
  const int bytes = partial_bytes(args.partial_pairs);
  dispatch_half(p.w.dtype(), [&](auto t) {
    using T = decltype(t);
    few ? launch(ctx, expert_gemm_kernel<T, 1, 2, 2>, grid, dim3(kThreads), bytes, args)
        : launch(ctx, expert_gemm_kernel<T, 4, 1, 2>, grid, dim3(kThreads), bytes, args);
  });
}

}  // namespace cpmcu::cuda
