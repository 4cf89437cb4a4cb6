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
#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/moe/moe_route.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kFewThreads = kMaxExperts / 2;

// ---- kernels

template <int kHeld>
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* logits, int64_t stride, int num_tokens, bool renormalise,
                  Routing routing) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;
  const Choice choice =
      choose_one<kHeld>(StoredLogits{logits, stride}, token, routing, renormalise);
  if (lane >= routing.top_k) return;
  routing.experts[token * routing.top_k + lane] = choice.expert;
  routing.weights[token * routing.top_k + lane] = choice.weight;
}

// Up to 64 tokens: one CTA chooses and sorts.
template <int kHeld>
__global__ void __launch_bounds__(kFewThreads)
    route_few_kernel(const float* logits, int64_t stride, int num_tokens, bool renormalise,
                     Routing routing) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  route_few<kHeld, kFewThreads>(StoredLogits{logits, stride}, num_tokens, renormalise, routing);
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

  // High half: the number of experts that have pairs. Low half: how many of them are below `own`.
  int active = 0;
  for (int i = threadIdx.x; i < routing.num_experts; i += kThreads) {
    if (has_pairs[i]) active += (1 << 16) + (i < own);
  }
  active = block_reduce<kThreads>(active, 0, scratch, Sum());
  const int before = active & 0xffff, num_active = active >> 16;
  if (threadIdx.x == 0) {
    routing.offsets[own] = offset;
    const int at = count > 0 ? before : num_active + own - before;
    if (count > 0) routing.active[at] = own;
    if (at < num_pairs) routing.spans[at] = {own, offset, count, -1};
    if (own == routing.num_experts - 1) {
      routing.offsets[own + 1] = num_pairs;
      *routing.num_active = num_active;
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
  dispatch_held(p.routing.num_experts, choose);
  if (few) return;
  launch(ctx, sort_kernel, dim3(p.routing.num_experts), dim3(kThreads), 0,
         num_tokens * p.routing.top_k, p.routing);
}

}  // namespace cpmcu::cuda
