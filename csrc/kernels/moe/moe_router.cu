// moe_router: RMSNorm of x, logits = x W^T in float32, and the routing. One launch up to 64 tokens.
//
// Roofline: latency. W of 128 experts x 2048 is 0.5 MB; it is in registers when x arrives.
//
// Schedule: a CTA owns 4, 8 or 16 rows of W, so 32 to 256 experts have 8 to 17 CTAs. The 92 KB of
// 16 rows of 2880 k take one SM about 1 us.
//   before the wait  8 warps load W; warp w has k chunks w, w + 8, ... of 64 k, as in skinny_gemm
//   norm             up to 8 tokens: every CTA norms all rows, each in a warp of its own, in the
//                    order of additions of rms_norm; CTA t also writes row t of x for the experts
//   GEMM             mma; rows of x in global memory are loaded 32 tokens ahead; the sums of the
//                    warps are added in warp order
//   routing          CTA 0 polls for the logits of all CTAs, chooses and sorts (moe_route.cuh)
//
// The surprising decision: a logit and the number of the launch are one 8-byte store. CTA 0 polls
// for the data itself, so there is no fence and no counter, and nothing to reset. A launch of its
// own for the routing, or a counter behind a fence, costs two trips to L2 more.
#include "kernels/moe/moe_router.h"

#include <algorithm>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/gemm.h"
#include "kernels/launch_checks.h"
#include "kernels/layer/add_bias.h"
#include "kernels/moe/moe_route.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 64;      // inputs (k) in a chunk of a warp
constexpr int kFewChunks = 4;   // chunks of a warp that are in flight; kManyChunks if K is larger
constexpr int kManyChunks = 8;  // the same for K up to 4096
constexpr int kNormedRows = 8;  // maximum number of rows that a CTA norms; each warp norms one
// Maximum H with which a CTA norms rows: a lane has up to 2 vectors of 8.
constexpr int kMaxNormed = 4096;

struct RouterArgs {
  float* logits;            // [T, n]
  void* x;                  // [T, k]
  const void* w;            // [n, k]
  const void* bias;         // [n]; null: no bias
  const void* norm_x;       // [T, k]; null: no norm
  const void* norm_weight;  // [k]
  float norm_eps, norm_offset;
  int m, n, k;
  int cta_rows;    // rows of W that a CTA has, at most 16
  int norm_warps;  // warps of a CTA of rms_norm, whose order of additions is used
  bool renormalise;
  uint32_t* launches;  // number of earlier launches
  uint64_t* messages;  // [T, n]: low half: a logit; high half: the number of the launch
  Routing routing;
};

// Logits that other CTAs send.
struct SentLogits {
  const uint64_t* messages;
  int stride;  // elements from one token to the next
  uint32_t launch;

  template <int kTokens, int kHeld>
  __device__ __forceinline__ void load(float (&held)[kTokens][kHeld], const int (&tokens)[kTokens],
                                       int num_experts) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    uint64_t message[kTokens][kHeld];
    bool complete;
    do {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const uint64_t* from = messages + tokens[t] * stride + 32 * i + lane;
          if (32 * i + lane < num_experts) message[t][i] = ptx::load_relaxed8(from);
        }
      }
      complete = true;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (32 * i + lane < num_experts && message[t][i] >> 32 != launch) complete = false;
        }
      }
    } while (!complete);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        held[t][i] = 32 * i + lane < num_experts
                         ? __uint_as_float(static_cast<uint32_t>(message[t][i]))
                         : -INFINITY;
      }
    }
  }
};

// A lane's part of 16 rows of W x 64 k: rows g and g + 8, two times 8 consecutive k each.
struct WeightFragment {
  uint4 v[2][2];  // W of each [row half][k half]
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rows of x after the norm, in shared memory. 64 bytes of padding keep the rows that lanes read
// together in different banks.
__device__ __forceinline__ int normed_stride(int k) { return 2 * k + 64; }

// Norms each row in a warp of its own. The warp does the work of all warps of rms_norm's CTA, so
// sums have the same order. `weights`: in shared memory; their copies may be incomplete.
template <typename T>
__device__ __forceinline__ void norm_rows(const RouterArgs& args, char* rows, const T* weights) {
  const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const normed = reinterpret_cast<T*>(rows + row * normed_stride(args.k));
  const bool exists = row < args.m;
  if (exists) {
    const T* const x = static_cast<const T*>(args.norm_x) + row * args.k;
    for (int column = lane * 8; column < args.k; column += 256) {
      ptx::cp_async16(normed + column, x + column);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (exists) {
    float own = 0;  // the sum of warp `lane` of rms_norm
#pragma unroll 4
    for (int i = 0; i < args.norm_warps; ++i) {
      const int column = (i * 32 + lane) * 8;
      float sum = 0;
      if (column < args.k) {
        const Vec16<T> v = load<T, 8>(normed + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += to_float(v[j]) * to_float(v[j]);
      }
      sum = warp_reduce(sum, Sum());
      if (lane == i) own = sum;
    }
    const float all = warp_reduce(own, Sum());
    const float scale = rsqrtf(all / static_cast<float>(args.k) + args.norm_eps);
    const bool writes = row % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
#pragma unroll 4
    for (int column = lane * 8; column < args.k; column += 256) {
      const Vec16<T> v = load<T, 8>(normed + column), weight = load<T, 8>(weights + column);
      Vec16<T> of_row;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        of_row[j] =
            from_float<T>(to_float(v[j]) * scale * (to_float(weight[j]) + args.norm_offset));
      }
      store(normed + column, of_row);
      if (writes) store(static_cast<T*>(args.x) + row * args.k + column, of_row);
    }
  }
  __syncthreads();
}

// A single row is normed by all warps. Warp w does the work of warps w, w + 8, ... of rms_norm's
// CTA.
constexpr int kVirtual = kMaxNormed / 8 / kThreads;

template <typename T>
__device__ __forceinline__ void norm_row(const RouterArgs& args, char* row,
                                         const Vec16<T> (&weights)[kVirtual]) {
  __shared__ float sums[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto column_of = [&](int i) { return ((i * kWarps + warp) * 32 + lane) * 8; };
  Vec16<T> x[kVirtual];
#pragma unroll
  for (int i = 0; i < kVirtual; ++i) {
    if (column_of(i) < args.k) {
      x[i] = load<T, 8>(static_cast<const T*>(args.norm_x) + column_of(i));
    }
  }
#pragma unroll
  for (int i = 0; i < kVirtual; ++i) {
    if (i * kWarps + warp >= args.norm_warps) break;
    float sum = 0;
    if (column_of(i) < args.k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += to_float(x[i][j]) * to_float(x[i][j]);
    }
    sum = warp_reduce(sum, Sum());
    if (lane == 0) sums[i * kWarps + warp] = sum;
  }
  __syncthreads();
  const float all = warp_reduce(lane < args.norm_warps ? sums[lane] : 0.0f, Sum());
  const float scale = rsqrtf(all / static_cast<float>(args.k) + args.norm_eps);
#pragma unroll
  for (int i = 0; i < kVirtual; ++i) {
    if (column_of(i) >= args.k) break;
    Vec16<T> normed;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      normed[j] =
          from_float<T>(to_float(x[i][j]) * scale * (to_float(weights[i][j]) + args.norm_offset));
    }
    store(reinterpret_cast<T*>(row) + column_of(i), normed);
    if (blockIdx.x == 0) store(static_cast<T*>(args.x) + column_of(i), normed);
  }
  __syncthreads();
}

// The sums of this warp's chunks. `weights` belong to the first chunks. `load_weights(to, k0)`
// loads those of a later one.
template <typename T, int kGroups, int kUnroll, bool kNorms, typename LoadWeights>
__device__ __forceinline__ void multiply(float (&sums)[kGroups][4],
                                         WeightFragment (&weights)[kUnroll], const RouterArgs& args,
                                         const char* normed, const LoadWeights& load_weights) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  // A batch has up to kBatch groups of 8 tokens. A token's 64 inputs of one chunk are loaded.
  constexpr int kBatch = kGroups < 4 ? kGroups : 4, kBatches = kGroups / kBatch;
  using Rows = uint4[kBatch][2];
  const auto load_rows = [&](Rows& to, int batch, int k0) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (batch * kBatch + i) * 8 + g;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const int k = k0 + run * 32 + q * 8;
        const T* from = kNorms ? reinterpret_cast<const T*>(normed + row * normed_stride(args.k))
                               : static_cast<const T*>(args.x) + int64_t{row} * args.k;
        to[i][run] = row < args.m && k < args.k ? *reinterpret_cast<const uint4*>(from + k)
                                                : uint4{0, 0, 0, 0};
      }
    }
  };

  // Main loop over this warp's chunks. While a batch is multiplied, the next one is loaded.
  [[maybe_unused]] Rows ahead;
  if constexpr (!kNorms) load_rows(ahead, 0, warp * kChunk);
#pragma unroll 1
  for (int k0 = warp * kChunk; k0 < args.k; k0 += kUnroll * kWarps * kChunk) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const WeightFragment f = weights[u];
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        const bool is_last = batch + 1 == kBatches || (batch + 1) * kBatch * 8 >= args.m;
        Rows rows;
        if constexpr (kNorms) {
          load_rows(rows, batch, k0 + u * kWarps * kChunk);
        } else {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) rows[i][0] = ahead[i][0], rows[i][1] = ahead[i][1];
          load_rows(ahead, is_last ? 0 : batch + 1, k0 + (u + is_last) * kWarps * kChunk);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int group = batch * kBatch + i;
          if (group * 8 >= args.m) continue;
#pragma unroll
          for (int run = 0; run < 2; ++run) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              const uint32_t a[4] = {word(f.v[0][run], 2 * pair), word(f.v[1][run], 2 * pair),
                                     word(f.v[0][run], 2 * pair + 1),
                                     word(f.v[1][run], 2 * pair + 1)};
              ptx::mma_16x8x16<T>(sums[group], a, word(rows[i][run], 2 * pair),
                                  word(rows[i][run], 2 * pair + 1));
            }
          }
        }
        if (is_last) break;
      }
      if constexpr (!kNorms) load_weights(weights[u], k0 + (kUnroll + u) * kWarps * kChunk);
    }
  }
}

// ---- kernels

// Loads the norm weights of this thread's columns.
template <typename T>
__device__ __forceinline__ void load_norm_weights(Vec16<T> (&to)[kVirtual],
                                                  const RouterArgs& args) {
#pragma unroll
  for (int i = 0; i < kVirtual; ++i) {
    const int column = (i * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (column < args.k) to[i] = load<T, 8>(static_cast<const T*>(args.norm_weight) + column);
  }
}

template <typename T,   // __half or __nv_bfloat16
          int kGroups,  // groups of 8 tokens: m <= 8 kGroups
          int kHeld,    // logits that a lane of `choose` holds
          int kUnroll,  // chunks of a warp that are in flight; all of K, if kNorms
          bool kNorms>  // the kernel norms x first
__global__ void __launch_bounds__(kThreads, 1)
    moe_router_kernel(const __grid_constant__ RouterArgs args) {
  extern __shared__ __align__(16) char normed[];
  __shared__ float partial[kWarps][8 * kGroups][16 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, q = lane % 4, n0 = blockIdx.x * args.cta_rows;
  const int end = min(n0 + args.cta_rows, args.n);
  const uint64_t policy = ptx::evict_first_policy();
  ptx::pdl_launch();

  WeightFragment weights[kUnroll];
  const auto load_weights = [&](WeightFragment& fragment, int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = n0 + half * 8 + g;
      const T* from = static_cast<const T*>(args.w) + int64_t{row} * args.k + k0 + q * 8;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        fragment.v[half][run] = row < end && k0 + run * 32 + q * 8 < args.k
                                    ? ptx::load_stream16(from + run * 32, policy)
                                    : uint4{0, 0, 0, 0};
      }
    }
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load_weights(weights[u], (u * kWarps + warp) * kChunk);
  [[maybe_unused]] Vec16<T> norm_weights[kVirtual];
  [[maybe_unused]] T* const shared_weights =
      reinterpret_cast<T*>(normed + args.m * normed_stride(args.k));
  if constexpr (kNorms) {
    if (args.m == 1) {
      load_norm_weights(norm_weights, args);
    } else {
      for (int column = threadIdx.x * 8; column < args.k; column += kThreads * 8) {
        ptx::cp_async16(shared_weights + column, static_cast<const T*>(args.norm_weight) + column);
      }
    }
  }
  // A thread with a logit has the column threadIdx.x % 16 of this CTA.
  const int own_row = n0 + static_cast<int>(threadIdx.x) % 16;
  const float bias = args.bias != nullptr && own_row < end
                         ? to_float(static_cast<const T*>(args.bias)[own_row])
                         : 0.0f;
  ptx::pdl_wait();
  const uint32_t launch = __ldcg(args.launches) + 1;
  if constexpr (kNorms) {
    if (args.m == 1) {
      norm_row<T>(args, normed, norm_weights);
    } else {
      norm_rows<T>(args, normed, shared_weights);
    }
  }
  float sums[kGroups][4] = {};
  multiply<T, kGroups, kUnroll, kNorms>(sums, weights, args, normed, load_weights);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[warp][group * 8 + q * 2 + i % 2][g + i / 2 * 8] = sums[group][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * args.m; i += kThreads) {
    const int row = i / 16, n = own_row;
    if (n >= end) continue;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) sum += partial[part][row][i % 16];
    if (args.bias != nullptr) sum += bias;
    if (n < args.routing.num_experts) {
      ptx::store_relaxed8(args.messages + row * args.n + n,
                          uint64_t{launch} << 32 | __float_as_uint(sum));
    }
    args.logits[row * args.n + n] = sum;
  }
  if (blockIdx.x != 0) return;
  route_few<kHeld, kThreads>(SentLogits{args.messages, args.n, launch}, args.m, args.renormalise,
                             args.routing);
  // All CTAs with an expert have sent a logit by now, and each read `launches` before. So it may
  // change.
  if (threadIdx.x == 0) *args.launches = launch;
}

}  // namespace

// ---- launchers

// Graph-safe.
void moe_router(const Context& ctx, const MoeRouterParams& p) {
  check_moe_router(p);
  check_rows("moe_router", "x", p.x);
  check_rows("moe_router", "w", p.w);
  const int64_t num_tokens = p.x.size(0), k = p.x.size(1), n = p.w.size(0);
  if (num_tokens == 0) return;
  const bool has_norm = !p.norm.out.empty();
  const bool norms = has_norm && num_tokens <= kNormedRows && k <= kMaxNormed &&
                     p.norm.index == nullptr && p.norm.out_stride == 0 &&
                     p.norm.x.data() != p.x.data();  // CTAs read all rows while others write
  if (has_norm && !norms) cuda::rms_norm(ctx, p.norm);
  if (num_tokens > kFewTokens) {
    cuda::skinny_gemm(ctx, {.y = p.logits, .x = p.x, .w = p.w});
    if (!p.bias.empty()) cuda::add_bias(ctx, {.y = p.logits, .bias = p.bias});
    cuda::moe_route(ctx, {.logits = p.logits, .renormalise = p.renormalise, .routing = p.routing});
    return;
  }
  CHECK_STATE(p.memory.num_bytes() >= moe_router_bytes(num_tokens, n),
              "moe_router: {} bytes of memory, expected {} for {} tokens", p.memory.num_bytes(),
              moe_router_bytes(num_tokens, n), num_tokens);
  const int cta_rows = n > 160 ? 16 : n > 64 ? 8 : 4;
  RouterArgs args{.logits = p.logits.as<float>(),
                  .x = p.x.data(),
                  .w = p.w.data(),
                  .bias = p.bias.data(),
                  .norm_x = nullptr,
                  .norm_weight = nullptr,
                  .norm_eps = p.norm.eps,
                  .norm_offset = p.norm.weight_offset,
                  .m = static_cast<int>(num_tokens),
                  .n = static_cast<int>(n),
                  .k = static_cast<int>(k),
                  .cta_rows = cta_rows,
                  .norm_warps = 2,
                  .renormalise = p.renormalise,
                  .launches = p.memory.as<uint32_t>(),
                  .messages = p.memory.as<uint64_t>() + 1,
                  .routing = p.routing};
  size_t shared_bytes = 0;
  if (norms) {
    check_rows("moe_router", "x of the norm", p.norm.x);
    check_vector("moe_router", "weight of the norm", p.norm.weight, p.x.dtype(), k);
    args.norm_x = p.norm.x.data();
    args.norm_weight = p.norm.weight.data();
    while (args.norm_warps * 32 < k / 8) args.norm_warps *= 2;  // as in rms_norm
    shared_bytes = static_cast<size_t>(num_tokens * (2 * k + 64) + 2 * k);
  }
  const dim3 grid((n + args.cta_rows - 1) / args.cta_rows);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_held(p.routing.num_experts, [&](auto held) {
      constexpr int kHeld = decltype(held)::value;
      const auto run = [&](auto kernel) {
        if (norms) allow_shared_bytes(kernel, kNormedRows * (2 * kMaxNormed + 64) + 2 * kMaxNormed);
        launch(ctx, kernel, grid, dim3(kThreads), shared_bytes, args);
      };
      const bool many = k > kFewChunks * kWarps * kChunk;
      if (norms && many) return run(moe_router_kernel<T, 1, kHeld, kManyChunks, true>);
      if (norms) return run(moe_router_kernel<T, 1, kHeld, kFewChunks, true>);
      num_tokens <= 8 ? run(moe_router_kernel<T, 1, kHeld, kFewChunks, false>)
                      : run(moe_router_kernel<T, 8, kHeld, kFewChunks, false>);
    });
  });
}

}  // namespace cpmcu::cuda
