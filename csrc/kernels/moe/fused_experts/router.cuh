// The router of fused_experts: logits that CTAs send each other, and the choice by every CTA.
#pragma once

#include "kernels/moe/fused_experts/args.cuh"
#include "kernels/moe/moe_route.cuh"

namespace cpmcu::cuda {
namespace {

namespace fused_experts_parts {

constexpr int kChunk = 64;  // k of a warp's chunk of the router
constexpr int kUnroll = 4;  // such chunks in flight

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The rows of the router's W of a CTA: row g is expert blockIdx.x + g gridDim.x. 8 warps share K.
struct RouterRows {
  uint4 v[kUnroll][2];  // [chunk][k half]

  template <typename T>
  __device__ __forceinline__ void load(const FusedExpertsArgs& args, int u, int k0) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = blockIdx.x + g * gridDim.x;
    const T* from = static_cast<const T*>(args.router_w) + int64_t{row} * args.k + k0 + q * 8;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const bool valid = row < args.num_experts && k0 + run * 32 + q * 8 < args.k;
      v[u][run] = valid ? __ldg(reinterpret_cast<const uint4*>(from + run * 32)) : uint4{};
    }
  }
};

// Sends this CTA's logits of the normed rows at x, in the order of additions of moe_router. All
// threads of the CTA call it. `partial`: [8 warps][8 tokens][8 experts].
template <bool kOne, typename T>
__device__ __forceinline__ void send_logits(const FusedExpertsArgs& args, RouterRows& w,
                                            const char* x, float* partial, uint32_t launch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  if (warp < kWarps) {
    float sums[4] = {};
#pragma unroll 1
    for (int k0 = warp * kChunk; k0 < args.k; k0 += kUnroll * kWarps * kChunk) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
          const int k = k0 + u * kWarps * kChunk + run * 32 + q * 8;
          const T* from = reinterpret_cast<const T*>(x + g * normed_stride(args.k)) + k;
          const uint4 row = g < args.tokens<kOne>() && k < args.k
                                ? *reinterpret_cast<const uint4*>(from)
                                : uint4{};
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            const uint32_t a[4] = {word(w.v[u][run], 2 * pair), 0, word(w.v[u][run], 2 * pair + 1),
                                   0};
            ptx::mma_16x8x16<T>(sums, a, word(row, 2 * pair), word(row, 2 * pair + 1));
          }
        }
        w.load<T>(args, u, k0 + (kUnroll + u) * kWarps * kChunk);
      }
    }
    partial[(warp * 8 + 2 * q) * 8 + g] = sums[0];
    partial[(warp * 8 + 2 * q + 1) * 8 + g] = sums[1];
  }
  __syncthreads();
  const int token = threadIdx.x / 8, row = threadIdx.x % 8;
  const int expert = blockIdx.x + row * gridDim.x;
  if (token < args.tokens<kOne>() && expert < args.num_experts) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) sum += partial[(part * 8 + token) * 8 + row];
    ptx::store_relaxed8(args.logits + token * args.num_experts + expert,
                        message(launch, __float_as_uint(sum)));
  }
}

// The routing of a CTA, in shared memory.
__device__ __forceinline__ Routing routing_at(const FusedExpertsArgs& args, char* shared) {
  const int num_pairs = args.m * args.top_k;
  Routing routing{.num_experts = args.num_experts, .top_k = args.top_k};
  routing.spans = reinterpret_cast<ExpertSpan*>(shared);
  routing.experts = reinterpret_cast<int*>(routing.spans + num_pairs);
  routing.weights = reinterpret_cast<float*>(routing.experts + num_pairs);
  routing.pairs = reinterpret_cast<int*>(routing.weights + num_pairs);
  routing.active = routing.pairs + num_pairs;
  routing.offsets = routing.active + num_pairs;
  routing.num_active = routing.offsets + args.num_experts + 1;
  return routing;
}
inline int routing_bytes(int num_pairs, int num_experts) {
  return num_pairs * (16 + 4 * 4) + (num_experts + 2) * 4;
}

using Scratch = RouteScratch<kConsumers>;
// Bytes of it that are used.
inline int scratch_bytes(int num_tokens) {
  return num_tokens == 1 ? sizeof(Scratch::chosen) : sizeof(Scratch);
}

// Chooses the experts of all tokens from the logits that the CTAs send. `shared`: scratch, which
// may be what send_logits used. kHeld: as in choose, of one token.
template <bool kOne, int kHeld>
__device__ __forceinline__ void choose_all(const FusedExpertsArgs& args, const Routing& routing,
                                           char* shared, uint32_t launch) {
  Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
  __syncthreads();
  if constexpr (kOne) {
    route_one<kHeld>(SentLogits{args.logits, launch}, args.renormalise, routing, scratch);
    return;  // after its barrier
  }
  const auto logits_of = [&](int token) {
    return SentLogits{args.logits + token * args.num_experts, launch};
  };
  if (args.num_experts <= 128) {
    route_few<4>(logits_of, args.m, args.renormalise, routing, scratch);
  } else {
    route_few<8>(logits_of, args.m, args.renormalise, routing, scratch);
  }
  __syncthreads();
}

}  // namespace fused_experts_parts

}  // namespace
}  // namespace cpmcu::cuda
