// The choice of experts by a warp, and the sort of up to 64 tokens' pairs by a CTA. moe_route and
// moe_router share it.
#pragma once

#include "core/reduce.cuh"
#include "kernels/moe/moe_route.h"

namespace cpmcu::cuda {
namespace {

// An integer in the order of floats. Both zeros give the same integer, NaN gives 1. No float gives
// 0: it marks an expert that cannot be chosen.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (isnan(x)) return 1;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t key) {
  if (key == 1) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The choice of one warp for one token: lane j has the expert of rank j and its weight.
struct Choice {
  int expert;
  float weight;
};

// The logits of tokens in memory, written by an earlier launch.
struct StoredLogits {
  const float* logits;
  int64_t stride;  // elements from one token to the next

  template <int kTokens, int kHeld>
  __device__ __forceinline__ void load(float (&held)[kTokens][kHeld], const int (&tokens)[kTokens],
                                       int num_experts) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int expert = 32 * i + static_cast<int>(threadIdx.x % 32);
        held[t][i] = expert < num_experts ? logits[tokens[t] * stride + expert] : -INFINITY;
      }
    }
  }
};

// Chooses for kTokens tokens in one warp. The steps for different tokens do not wait for each
// other. kHeld: logits of a lane, E <= 32 kHeld. Logit i of lane l is of expert 32 i + l.
template <int kHeld, int kTokens, typename Logits>
__device__ __forceinline__ void choose(Choice (&choices)[kTokens], const Logits& logits,
                                       const int (&tokens)[kTokens], const Routing& routing,
                                       bool renormalise) {
  const int lane = threadIdx.x % 32;
  uint32_t keys[kTokens][kHeld];
  float held[kTokens][kHeld], largest[kTokens], sum[kTokens] = {}, logit[kTokens] = {};
  logits.load(held, tokens, routing.num_experts);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    largest[t] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      keys[t][i] = 32 * i + lane < routing.num_experts ? ordered(held[t][i]) : 0;
      largest[t] = fmaxf(largest[t], held[t][i]);  // ignores NaN
    }
    largest[t] = warp_reduce(largest[t], Max());
    if (!renormalise) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (32 * i + lane < routing.num_experts) sum[t] += expf(held[t][i] - largest[t]);
      }
      sum[t] = warp_reduce(sum[t], Sum());
    }
    choices[t].expert = 0;
  }

  for (int rank = 0; rank < routing.top_k; ++rank) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) own = max(own, keys[t][i]);
      const uint32_t best = __reduce_max_sync(0xffffffffu, own);
      uint32_t candidate = 0xffffffffu;  // the lowest expert with this key
#pragma unroll
      for (int i = kHeld - 1; i >= 0; --i) {
        if (keys[t][i] == best) candidate = 32 * i + lane;
      }
      const int winner = static_cast<int>(__reduce_min_sync(0xffffffffu, candidate));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (32 * i + lane == winner) keys[t][i] = 0;
      }
      if (rank == lane) choices[t].expert = winner, logit[t] = unordered(best);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float weight = lane < routing.top_k ? expf(logit[t] - largest[t]) : 0.0f;
    if (renormalise) sum[t] = warp_reduce(weight, Sum());
    choices[t].weight = weight / sum[t];
  }
}

// Chooses for one token in one warp.
template <int kHeld, typename Logits>
__device__ __forceinline__ Choice choose_one(const Logits& logits, int token,
                                             const Routing& routing, bool renormalise) {
  Choice choices[1];
  choose<kHeld>(choices, logits, {token}, routing, renormalise);
  return choices[0];
}

// Chooses for one token. All kThreads threads of a CTA call it. The warp that chooses also sorts.
template <int kHeld, int kThreads, typename Logits>
__device__ __forceinline__ void route_one(const Logits& logits, bool renormalise,
                                          const Routing& routing) {
  __shared__ int chosen[kMaxTopK];
  const int lane = threadIdx.x % 32, top_k = routing.top_k;
  if (threadIdx.x < 32) {
    const Choice choice = choose_one<kHeld>(logits, 0, routing, renormalise);
    int place = 0;
    for (int rank = 0; rank < top_k; ++rank) {
      place += __shfl_sync(0xffffffffu, choice.expert, rank) < choice.expert;
    }
    if (lane < top_k) {
      routing.spans[place] = {choice.expert, place, 1, lane};
      routing.weights[lane] = choice.weight;
      routing.experts[lane] = chosen[lane] = routing.active[place] = choice.expert;
      routing.pairs[place] = lane;
    }
    if (lane == 0) *routing.num_active = top_k;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert <= routing.num_experts; expert += kThreads) {
    int lower = 0;
    for (int rank = 0; rank < top_k; ++rank) lower += chosen[rank] < expert;
    routing.offsets[expert] = lower;
  }
}

// Chooses for up to 64 tokens and sorts their pairs. All kThreads threads of a CTA call it.
// `logits` has `load`, as StoredLogits.
template <int kHeld, int kThreads, typename Logits>
__device__ __forceinline__ void route_few(const Logits& logits, int num_tokens, bool renormalise,
                                          const Routing& routing) {
  if (num_tokens == 1) return route_one<kHeld, kThreads>(logits, renormalise, routing);
  constexpr int kOwn = kMaxExperts / kThreads;           // experts of a thread in the scan
  __shared__ unsigned long long tokens_of[kMaxExperts];  // bit t: token t chose the expert
  __shared__ int first_of[kMaxExperts];                  // place of the expert's first pair
  __shared__ uint32_t before_warp[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top_k = routing.top_k;
  for (int i = threadIdx.x; i < kMaxExperts; i += kThreads) tokens_of[i] = 0;
  __syncthreads();
  // A warp chooses for kTogether tokens at once.
  constexpr int kWarps = kThreads / 32, kTogether = kHeld <= 8 ? 4 : kHeld <= 16 ? 2 : 1;
  const auto choose_for = [&](auto together, int first) {
    constexpr int kTokens = decltype(together)::value;
    int tokens[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) tokens[t] = min(first + t * kWarps, num_tokens - 1);
    Choice choices[kTokens];
    choose<kHeld>(choices, logits, tokens, routing, renormalise);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int token = tokens[t];
      if (lane >= top_k || token != first + t * kWarps) continue;
      routing.experts[token * top_k + lane] = choices[t].expert;
      routing.weights[token * top_k + lane] = choices[t].weight;
      atomicOr(&tokens_of[choices[t].expert], 1ull << token);
    }
  };
  int token = warp;
  for (; token + kWarps < num_tokens; token += kTogether * kWarps) {
    choose_for(IntConstant<kTogether>{}, token);
  }
  if (token < num_tokens) choose_for(IntConstant<1>{}, token);
  __syncthreads();

  // The scan adds pairs in the low and active experts in the high half.
  int counts[kOwn];
  uint32_t items[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    counts[i] = __popcll(tokens_of[kOwn * threadIdx.x + i]);
    items[i] = counts[i] + (counts[i] > 0 ? 1u << 16 : 0u);
    sum += items[i];
  }
  uint32_t before = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) before_warp[warp] = before;
  before -= sum;
  __syncthreads();
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += before_warp[i];
    all += before_warp[i];
  }
  const int num_active = static_cast<int>(all >> 16);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = kOwn * threadIdx.x + i;
    if (expert < routing.num_experts) {
      const int first = static_cast<int>(before & 0xffff);
      first_of[expert] = routing.offsets[expert] = first;
      if (counts[i] > 0) {
        routing.active[before >> 16] = expert;
        routing.spans[before >> 16] = {expert, first, counts[i], -1};
      }
    }
    before += items[i];
  }
  const int num_pairs = num_tokens * top_k;
  for (int i = num_active + threadIdx.x; i < min(routing.num_experts, num_pairs); i += kThreads) {
    routing.spans[i] = {0, 0, 0, -1};
  }
  if (threadIdx.x == 0) {
    routing.offsets[routing.num_experts] = num_pairs;
    *routing.num_active = num_active;
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) {
    const int chosen = routing.experts[pair];
    const unsigned long long lower = (1ull << pair / top_k) - 1;
    routing.pairs[first_of[chosen] + __popcll(tokens_of[chosen] & lower)] = pair;
  }
}

// Calls f with the logits that a lane holds.
template <typename F>
void dispatch_held(int num_experts, F&& f) {
  if (num_experts <= 128) return f(IntConstant<4>{});
  if (num_experts <= 256) return f(IntConstant<8>{});
  if (num_experts <= 512) return f(IntConstant<16>{});
  f(IntConstant<32>{});
}

}  // namespace
}  // namespace cpmcu::cuda
