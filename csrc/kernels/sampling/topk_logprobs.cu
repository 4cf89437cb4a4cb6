// topk_logprobs: the k most likely tokens of each row (contract: kernels/tree/tree.h).
//
// Roofline: 4 bytes a token, read once from L2.
//
// Schedule: a team of CTAs handles one row, as in sample.cu.
//   1. Each thread finds its largest logit and its sum of exponentials in one pass.
//   2. The bound is the k-th largest of the warps' maxima. At least k tokens are >= the bound.
//   3. Only threads whose maximum is >= the bound read their tokens again. They list the tokens
//      that are >= the bound.
//   4. The list is ranked by counting. The first CTA ranks the k best of all CTAs.
// If fewer than k warps have tokens, the bound is the k-th largest of the threads' maxima (a binary
// search by CTA-wide votes). If the list overflows, the bound is searched among the tokens.
//
// Surprising: infinities count as the largest finite numbers, so no difference is NaN. Sums have a
// fixed order, which depends only on V.
#include <limits>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "kernels/launch_checks.h"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = 4;       // loads of a thread that are in flight
constexpr int kListSize = 256;  // maximum number of tokens that a CTA ranks
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kLog2E = 1.4426950408889634f;
static_assert(kMaxTeamCtas * kMaxTopk <= kThreads, "each thread ranks one token");
static_assert(kMaxTopk <= kListSize, "the list must hold the k best of a CTA");

struct TopkArgs {
  const float* logits;  // [R, V]
  const int* id_map;    // [V] draft id -> target id; null: the ids are equal
  int* tokens;          // [R, k]
  float* logprobs;      // [R, k]
  int vocab_size;
  int topk;
};

struct Smem {
  uint64_t list[kListSize];
  uint64_t best[kMaxTeamCtas * kMaxTopk];  // in the first CTA: the k best of each CTA
  float maxima[kMaxTeamCtas];              // in the first CTA: the maximum of each CTA
  float sums[kMaxTeamCtas];                // in the first CTA: the sum of each CTA
  uint64_t warp_best[kThreads / 32];
  float scratch[32];
  int count_scratch[32];
  int list_size;
};

// ---- kernels

__device__ __forceinline__ float finite(float z) { return fminf(fmaxf(z, -kLargest), kLargest); }

// Calls f(first, z) for batches of this thread's tokens in ascending order. z[4 j .. 4 j + 3] are
// the logits of tokens first + j * kThreads * 4 onwards. After the end of the row z is -inf.
template <bool kAligned, typename F>
__device__ __forceinline__ void for_each_batch(const float* logits, int vocab_size, F f) {
  constexpr int kStep = 4 * Team::kCtas;
  const int part = (vocab_size + kStep - 1) / kStep * 4;
  const int begin = blockIdx.x * part, end = min(begin + part, vocab_size);
  for (int first = begin + threadIdx.x * 4; first < end; first += kBatch * kThreads * 4) {
    float z[kBatch * 4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = first + j * kThreads * 4;
      float* four = z + 4 * j;
      if (kAligned && token < end) {
        const float4 packed = *reinterpret_cast<const float4*>(logits + token);
        four[0] = packed.x, four[1] = packed.y, four[2] = packed.z, four[3] = packed.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = token + i < end ? logits[token + i] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) {
      const int token = first + i / 4 * kThreads * 4 + i % 4;
      z[i] = token < end ? finite(z[i]) : -kInfinity;
    }
    f(first, z);
  }
}

// Calls f(key) for each of this thread's tokens.
template <bool kAligned, typename F>
__device__ __forceinline__ void for_each_key(const float* logits, int vocab_size, F f) {
  for_each_batch<kAligned>(logits, vocab_size, [&](int first, const float (&z)[kBatch* 4]) {
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) {
      if (z[i] > -kInfinity) f(key_of(z[i], first + i / 4 * kThreads * 4 + i % 4));
    }
  });
}

// The `wanted`-th largest of the warps' maxima, or 0 if there are fewer. All warps compute it.
__device__ __forceinline__ uint64_t best_of_warps(const uint64_t* best, int wanted) {
  constexpr int kWarps = kThreads / 32;
  const uint64_t mine = best[threadIdx.x % kWarps];
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) rank += best[i] > mine ? 1 : 0;
  const uint32_t found = __ballot_sync(0xffffffffu, rank == wanted - 1 && mine != 0);
  return found == 0 ? 0 : __shfl_sync(0xffffffffu, mine, __ffs(found) - 1);
}

// Grid: (kMaxTeamCtas, R). Without clusters, the first CTA of a row does all the work.
template <bool kAligned>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__global__ void __launch_bounds__(kThreads) __cluster_dims__(kMaxTeamCtas, 1, 1)
#else
__global__ void __launch_bounds__(kThreads)
#endif
    topk_logprobs_kernel(const __grid_constant__ TopkArgs args) {
  __shared__ Smem smem;
  ptx::pdl_launch();
  Team::sync();  // other CTAs may write to a CTA's shared memory only after it has started
  ptx::pdl_wait();
  if (blockIdx.x >= Team::kCtas) return;

  const int topk = args.topk, thread = threadIdx.x;
  const float* logits = args.logits + int64_t{blockIdx.y} * args.vocab_size;
  float maximum = -kInfinity, sum = 0;  // the largest logit, and the sum of exp(z - maximum)
  int likeliest = 0;
  for_each_batch<kAligned>(logits, args.vocab_size, [&](int first, const float (&z)[kBatch* 4]) {
    const float before = maximum;
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) {
      if (z[i] > maximum) maximum = z[i], likeliest = first + i / 4 * kThreads * 4 + i % 4;
    }
    sum *= ptx::exp2_approx((before - maximum) * kLog2E);
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) sum += ptx::exp2_approx((z[i] - maximum) * kLog2E);
  });
  const bool has_tokens = maximum > -kInfinity;
  const uint64_t key = has_tokens ? key_of(maximum, likeliest) : 0;
  const uint64_t warp_best = warp_reduce(key, Max{});
  if (thread % 32 == 0) smem.warp_best[thread / 32] = warp_best;  // read after the next barrier
  const float cta_maximum = block_reduce<kThreads>(maximum, -kInfinity, smem.scratch, Max{});
  sum = has_tokens ? sum * ptx::exp2_approx((maximum - cta_maximum) * kLog2E) : 0.0f;
  const float cta_sum = block_reduce<kThreads>(sum, 0.0f, smem.scratch, Sum{});

  // Lists the tokens >= cut. If fewer than k threads have tokens, cut is 0 and all tokens are
  // listed.
  const auto list_from = [&](uint64_t cut) {
    if (thread == 0) smem.list_size = 0;
    __syncthreads();
    if (has_tokens && key >= cut) {
      for_each_key<kAligned>(logits, args.vocab_size, [&](uint64_t other) {
        if (other < cut) return;
        const int place = atomicAdd(&smem.list_size, 1);
        if (place < kListSize) smem.list[place] = other;
      });
    }
    __syncthreads();
  };
  uint64_t cut = best_of_warps(smem.warp_best, topk);
  if (cut == 0) {
    cut = find_cut(topk, [&](uint64_t least) { return __syncthreads_count(key >= least); });
  }
  list_from(cut);
  if (smem.list_size > kListSize) {
    list_from(find_cut(topk, [&](uint64_t cut) {
      int count = 0;
      if (has_tokens && key >= cut) {
        for_each_key<kAligned>(logits, args.vocab_size,
                               [&](uint64_t other) { count += other >= cut ? 1 : 0; });
      }
      return block_reduce<kThreads>(count, 0, smem.count_scratch, Sum{});
    }));
  }

  // The order of the list depends on thread timing; the ranks do not.
  Smem& first_cta = *Team::shared_of(0, &smem);
  const int list_size = smem.list_size;
  if (thread < list_size) {
    const uint64_t mine = smem.list[thread];
    int rank = 0;
    for (int i = 0; i < list_size; ++i) rank += smem.list[i] > mine ? 1 : 0;
    if (rank < topk) first_cta.best[blockIdx.x * topk + rank] = mine;
  } else if (thread < topk) {
    first_cta.best[blockIdx.x * topk + thread] = 0;
  }
  if (thread == 0) {
    first_cta.maxima[blockIdx.x] = cta_maximum;
    first_cta.sums[blockIdx.x] = cta_sum;
  }
  Team::sync();

  constexpr int kCtas = Team::kCtas;
  if (blockIdx.x != 0 || thread >= kCtas * topk) return;
  const uint64_t mine = smem.best[thread];
  int rank = 0;
  for (int i = 0; i < kCtas * topk; ++i) rank += smem.best[i] > mine ? 1 : 0;
  if (mine == 0 || rank >= topk) return;
  float row_maximum = smem.maxima[0];
  for (int i = 1; i < kCtas; ++i) row_maximum = fmaxf(row_maximum, smem.maxima[i]);
  float row_sum = 0;
  for (int i = 0; i < kCtas; ++i) {
    row_sum += smem.sums[i] * ptx::exp2_approx((smem.maxima[i] - row_maximum) * kLog2E);
  }
  const float z = value_of(mine);
  const int out = blockIdx.y * topk + rank, id = token_of(mine);
  args.tokens[out] = args.id_map ? args.id_map[id] : id;
  args.logprobs[out] = z <= -kLargest ? -kInfinity : z - row_maximum - logf(row_sum);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: id_map.
void topk_logprobs(const Context& ctx, const TopkLogprobsParams& p) {
  check_topk(p);
  if (p.logits.size(0) == 0) return;
  const TopkArgs args{.logits = p.logits.as<float>(),
                      .id_map = p.id_map,
                      .tokens = p.tokens,
                      .logprobs = p.logprobs,
                      .vocab_size = static_cast<int>(p.logits.size(1)),
                      .topk = p.topk};
  const bool aligned = args.vocab_size % 4 == 0 && is_aligned16(args.logits);
  const auto kernel = aligned ? topk_logprobs_kernel<true> : topk_logprobs_kernel<false>;
  launch(ctx, kernel, dim3(kMaxTeamCtas, p.logits.size(0)), dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
