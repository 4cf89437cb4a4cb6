// moe_route: softmax over E logits, the k largest, and the P = T k pairs sorted by expert.
//
// Roofline: latency. For 64 tokens of 128 experts it reads 32 KB; a decode step has one such launch
// pair a layer.
//
// Schedule: two kernels.
//   choose  a warp a token; a lane holds E / 32 logits as ordered integers, and the warp reduces
//           the largest k times
//   sort    a CTA an expert; it counts the pairs of lower experts and its own, then writes its own
//           in order of number
//
// The surprising decision: every CTA of the second kernel reads all pairs. So no CTA waits for
// another, no atomics are needed, and the order is the same in every run. P is at most 32 K.
#include "kernels/moe/moe_route.h"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// An integer in the order of floats: NaN is the smallest, the zeros are equal.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (isnan(x)) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// ---- kernels

// kHeld: logits of a lane, E <= 32 kHeld. Logit i of lane l is of expert 32 i + l.
template <int kHeld>
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* logits, int64_t stride, int num_tokens, bool renormalise,
                  Routing routing) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;
  logits += token * stride;
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
  int expert = 0;  // lane j: of rank j
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
  float weight = lane < routing.top_k ? expf(logits[expert] - largest) : 0.0f;
  const float chosen_sum = warp_reduce(weight, Sum());
  weight /= renormalise ? chosen_sum : sum;
  if (lane >= routing.top_k) return;
  routing.experts[token * routing.top_k + lane] = expert;
  routing.weights[token * routing.top_k + lane] = weight;
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
  const auto choose = [&](auto kernel) {
    launch(ctx, kernel, dim3((num_tokens + kWarps - 1) / kWarps), dim3(kThreads), 0,
           p.logits.as<const float>(), p.logits.size(1), num_tokens, p.renormalise, p.routing);
  };
  const int num_experts = p.routing.num_experts;
  if (num_experts <= 128) {
    choose(choose_kernel<4>);
  } else if (num_experts <= 512) {
    choose(choose_kernel<16>);
  } else {
    choose(choose_kernel<32>);
  }
  launch(ctx, sort_kernel, dim3(num_experts), dim3(kThreads), 0, num_tokens * p.routing.top_k,
         p.routing);
}

}  // namespace cpmcu::cuda
