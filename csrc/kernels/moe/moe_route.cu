// moe_route: softmax over E logits, the k largest, and the P = T k pairs sorted by expert.
//
// Roofline: latency. For 64 tokens of 128 experts it reads 32 KB; a decode step has one launch a
// layer.
//
// Schedule: a warp a token; a lane holds E / 32 logits as ordered integers, and the warp reduces
// the largest k times. Then
//   up to 64 tokens   the same CTA sorts: an expert has a 64-bit mask of its tokens, a scan over
//                     the experts gives their first places, and a pair counts the lower tokens
//   more tokens       a second kernel with a CTA an expert; it counts the pairs of lower experts
//                     and its own, then writes its own in order of number
//
// The surprising decision: every CTA of the second kernel reads all pairs. So no CTA waits for
// another, no float and no order depends on atomics, and the pairs are the same in every run. P is
// at most 64 K.
#include "kernels/moe/moe_route.h"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kFewTokens = 64;
constexpr int kFewThreads = kMaxExperts / 2;

// An integer in the order of floats: NaN is the smallest, the zeros are equal.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (isnan(x)) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The choice of one warp for one token: lane j has the expert of rank j and its weight.
struct Choice {
  int expert;
  float weight;
};

// kHeld: logits of a lane, E <= 32 kHeld. Logit i of lane l is of expert 32 i + l.
template <int kHeld>
__device__ __forceinline__ Choice choose(const float* logits, const Routing& routing,
                                         bool renormalise) {
  const int lane = threadIdx.x % 32;
  uint32_t keys[kHeld];
  float held[kHeld], largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int expert = 32 * i + lane;
    held[i] = expert < routing.num_experts ? logits[expert] : -INFINITY;
    keys[i] = ordered(held[i]);
    largest = fmaxf(largest, held[i]);  // ignores NaN
  }
  largest = warp_reduce(largest, Max());
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (32 * i + lane < routing.num_experts) sum += expf(held[i] - largest);
  }
  sum = warp_reduce(sum, Sum());

  uint32_t open = 0;  // bit i: logit i is of an expert that is not chosen
#pragma unroll
  for (int i = 0; i < kHeld; ++i) open |= uint32_t{32 * i + lane < routing.num_experts} << i;
  int expert = 0;
  for (int rank = 0; rank < routing.top_k; ++rank) {
    unsigned long long best = 0;  // key, then the lower expert
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const unsigned long long candidate =
          static_cast<unsigned long long>(keys[i]) << 32 | (0xffffffffu - (32 * i + lane));
      if ((open >> i & 1) && candidate > best) best = candidate;
    }
    best = warp_reduce(best, Max());
    const int winner = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    if (winner % 32 == lane) open &= ~(1u << winner / 32);
    if (rank == lane) expert = winner;
  }
  const float weight = lane < routing.top_k ? expf(logits[expert] - largest) : 0.0f;
  const float chosen_sum = warp_reduce(weight, Sum());
  return {expert, weight / (renormalise ? chosen_sum : sum)};
}

// ---- kernels

template <int kHeld>
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* logits, int64_t stride, int num_tokens, bool renormalise,
                  Routing routing) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;
  const Choice choice = choose<kHeld>(logits + token * stride, routing, renormalise);
  if (lane >= routing.top_k) return;
  routing.experts[token * routing.top_k + lane] = choice.expert;
  routing.weights[token * routing.top_k + lane] = choice.weight;
}

// Up to 64 tokens: one CTA chooses and sorts.
template <int kHeld>
__global__ void __launch_bounds__(kFewThreads)
    route_few_kernel(const float* logits, int64_t stride, int num_tokens, bool renormalise,
                     Routing routing) {
  __shared__ unsigned long long tokens_of[kMaxExperts];  // bit t: token t chose the expert
  __shared__ int first_of[kMaxExperts];                  // place of the expert's first pair
  __shared__ uint32_t before_warp[kFewThreads / 32];
  ptx::pdl_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top_k = routing.top_k;
  for (int i = threadIdx.x; i < kMaxExperts; i += kFewThreads) tokens_of[i] = 0;
  __syncthreads();
  ptx::pdl_wait();
  for (int token = warp; token < num_tokens; token += kFewThreads / 32) {
    const Choice choice = choose<kHeld>(logits + token * stride, routing, renormalise);
    if (lane >= top_k) continue;
    routing.experts[token * top_k + lane] = choice.expert;
    routing.weights[token * top_k + lane] = choice.weight;
    atomicOr(&tokens_of[choice.expert], 1ull << token);
  }
  __syncthreads();

  // A thread has two experts. The scan adds pairs in the low and active experts in the high half.
  const int expert = 2 * threadIdx.x;
  const int counts[2] = {__popcll(tokens_of[expert]), __popcll(tokens_of[expert + 1])};
  const auto item = [&](int i) { return counts[i] + (counts[i] > 0 ? 1u << 16 : 0u); };
  uint32_t sum = item(0) + item(1);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) before_warp[warp] = sum;
  __syncthreads();
  uint32_t before = sum - item(0) - item(1), all = 0;
#pragma unroll
  for (int i = 0; i < kFewThreads / 32; ++i) {
    if (i < warp) before += before_warp[i];
    all += before_warp[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (expert + i < routing.num_experts) {
      first_of[expert + i] = routing.offsets[expert + i] = before & 0xffff;
      if (counts[i] > 0) routing.active[before >> 16] = expert + i;
    }
    before += item(i);
  }
  if (threadIdx.x == 0) {
    routing.offsets[routing.num_experts] = num_tokens * top_k;
    *routing.num_active = all >> 16;
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_tokens * top_k; pair += kFewThreads) {
    const int chosen = routing.experts[pair];
    const unsigned long long lower = (1ull << pair / top_k) - 1;
    routing.pairs[first_of[chosen] + __popcll(tokens_of[chosen] & lower)] = pair;
  }
}

__global__ void __launch_bounds__(kThreads) sort_kernel(int num_pairs, Routing routing) {
  __shared__ uint8_t has_pairs[kMaxExperts];
  __shared__ int lower_of[kWarps], own_of[kWarps], scratch[32];
  ptx::pdl_launch();
  const int own = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < routing.num_experts; i += kThreads) has_pairs[i] = 0;
  __syncthreads();
  ptx::pdl_wait();

  // A warp has consecutive pairs, a multiple of 32, so that their order is known.
  const int warp_pairs = (num_pairs + kThreads - 1) / kThreads * 32;
  const int begin = warp * warp_pairs, end = min(begin + warp_pairs, num_pairs);
  int lower = 0, owned = 0;
  for (int i = begin + lane; i < end; i += 32) {
    const int expert = routing.experts[i];
    has_pairs[expert] = 1;  // all writers write the same
    lower += expert < own;
    owned += expert == own;
  }
  lower = warp_reduce(lower, Sum());
  owned = warp_reduce(owned, Sum());
  if (lane == 0) lower_of[warp] = lower, own_of[warp] = owned;
  __syncthreads();
  int offset = 0, count = 0, place = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    offset += lower_of[i];
    if (i < warp) place += own_of[i];
    count += own_of[i];
  }
  place += offset;

  // The number of lower experts that have pairs.
  int before = 0;
  for (int i = threadIdx.x; i < own; i += kThreads) before += has_pairs[i];
  before = block_reduce<kThreads>(before, 0, scratch, Sum());
  if (threadIdx.x == 0) {
    routing.offsets[own] = offset;
    if (count > 0) routing.active[before] = own;
    if (own == routing.num_experts - 1) {
      routing.offsets[own + 1] = num_pairs;
      *routing.num_active = before + (count > 0);
    }
  }
  if (count == 0) return;
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane;
    const bool is_own = i < end && routing.experts[i] == own;
    const uint32_t all = __ballot_sync(0xffffffffu, is_own);
    if (is_own) routing.pairs[place + __popc(all & ((1u << lane) - 1))] = i;
    place += __popc(all);
  }
}

}  // namespace

// ---- launchers

// Graph-safe.
void moe_route(const Context& ctx, const MoeRouteParams& p) {
  check_moe_route(p);
  const int num_tokens = static_cast<int>(p.logits.size(0));
  if (num_tokens == 0) return;
  const bool few = num_tokens <= kFewTokens;
  const dim3 grid(few ? 1 : (num_tokens + kWarps - 1) / kWarps);
  const auto choose = [&](auto held) {
    constexpr int kHeld = decltype(held)::value;
    const auto kernel = few ? route_few_kernel<kHeld> : choose_kernel<kHeld>;
    launch(ctx, kernel, grid, dim3(few ? kFewThreads : kThreads), 0, p.logits.as<const float>(),
           p.logits.size(1), num_tokens, p.renormalise, p.routing);
  };
  const int num_experts = p.routing.num_experts;
  if (num_experts <= 128) {
    choose(IntConstant<4>{});
  } else if (num_experts <= 512) {
    choose(IntConstant<16>{});
  } else {
    choose(IntConstant<32>{});
  }
  if (few) return;
  launch(ctx, sort_kernel, dim3(num_experts), dim3(kThreads), 0, num_tokens * p.routing.top_k,
         p.routing);
}

}  // namespace cpmcu::cuda
