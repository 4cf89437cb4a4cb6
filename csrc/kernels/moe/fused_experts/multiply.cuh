// The products of fused_experts: gate and up, whose activations CTAs send each other, and down.
#pragma once

#include "kernels/layer/silu.cuh"
#include "kernels/moe/fused_experts/load.cuh"

namespace cpmcu::cuda {
namespace {

namespace fused_experts_parts {

// The stages of a consumer warp.
template <typename Unpacker>
struct WarpStages {
  const Stage<Unpacker>* data;
  uint32_t barriers;  // of the warp: see Barriers
  int count, stage = 0, parity = 0;

  // sums += the products of the next block and x, 8 rows. `x(step, b)` writes a B fragment.
  template <typename T, typename LoadX>
  __device__ __forceinline__ void multiply(float (&sums)[2][1][4], uint8_t form, const LoadX& x) {
    ptx::mbarrier_wait(Barriers::full(barriers, stage), parity);
    multiply_warp_tile<Unpacker, T, 1>(
        sums, data[stage], form, [](int) { return true; },
        [&](int step, int, uint32_t (&b)[2]) { x(step, b); }, [](int) {});
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(Barriers::empty(barriers, stage));
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

// ---- gate and up

// Sums of the warps of a group: [2 units][8 warps][columns][kTileSums].
constexpr int kTileSums = kWarpTileRows + 1;  // padded

// Adds the warps' sums of a unit, and sends silu(gate) * up of its pairs. A warp has 32 rows of W
// of one pair at a time: a lane adds the sums of one row.
template <bool kOne, typename T>
__device__ __forceinline__ void send_acts(const FusedExpertsArgs& args, const Routing& routing,
                                          const ExpertSpan& span, int first_tile,
                                          const float* partial, uint32_t launch) {
  const int splits = args.gate_up.splits, tiles = kWarps / splits, columns = kColumns<kOne>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
#pragma unroll 1
  for (int i = warp; i < tiles * count_of<kOne>(span); i += kWarps) {
    const int tile = i % tiles, column = i / tiles;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part >= splits) break;
      sum += partial[((tile * splits + part) * columns + column) * kTileSums + lane];
    }
    sum *= args.alpha;
    const float up = __shfl_xor_sync(0xffffffffu, sum, 8);  // of a lane with gate
    const float act = silu(sum) * up;
    const float next = __shfl_down_sync(0xffffffffu, act, 1);
    const int k = (first_tile + tile) * 16 + lane / 16 * 8 + lane % 8;
    if (lane % 16 >= 8 || lane % 2 == 1 || k >= args.width) continue;
    const int pair = pair_of<kOne>(routing, span, column);
    ptx::store_relaxed8(
        args.acts + ((pair * args.act_steps() + k / 16) * 4 + k % 8 / 2) * 2 + k % 16 / 8,
        message(launch, pack2<T>(act, next)));
  }
}

template <bool kOne, typename T, typename Unpacker>
__device__ __forceinline__ void multiply_gate_up(const FusedExpertsArgs& args,
                                                 const Routing& routing,
                                                 WarpStages<Unpacker>& stages, const char* x,
                                                 float* partial, uint32_t launch) {
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int num_spans = *routing.num_active, columns = kColumns<kOne>;
  Part part;
#pragma unroll 1
  for (int n = 0; gate_up_part(args, num_spans, n, warp, part); ++n) {
    const ExpertSpan span = routing.spans[part.span];
    const int pair = pair_of<kOne>(routing, span, g);
    const T* row = reinterpret_cast<const T*>(
                       x + (kOne ? 0 : max(pair, 0) / args.top_k * normed_stride(args.k))) +
                   2 * q;
    float sums[2][1][4] = {};
#pragma unroll 1
    for (int block = part.has_blocks ? part.split : INT_MAX; block < args.gate_up.k_blocks;
         block += args.gate_up.splits) {
      const int left = pair >= 0 ? args.k - block * kPackedK - 2 * q : 0;
      const T* from = row + block * kPackedK;
      stages.template multiply<T>(sums, args.gate_up.form, [&](int step, uint32_t (&b)[2]) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(from + step * 16);
        b[0] = step * 16 < left ? at[0] : 0u;
        b[1] = step * 16 + 8 < left ? at[4] : 0u;
      });
    }
    // Two buffers: the sums of the unit before may still be read.
    float* own = partial + n % 2 * (kWarps * columns * kTileSums);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 2 * q + i % 2, tile = i / 4;
      if (column < count_of<kOne>(span)) {
        own[(warp % kWarps * columns + column) * kTileSums + tile * 16 + g + i % 4 / 2 * 8] =
            sums[tile][0][i % 4];
      }
    }
    ptx::named_barrier(1 + warp / kWarps, kThreads);
    send_acts<kOne, T>(args, routing, span, part.tile - warp % kWarps / args.gate_up.splits, own,
                       launch);
  }
}

// ---- down

// Activations of a k block and a pair in shared memory: 8-byte fragments of each step and q.
constexpr int kActBytes = 288;  // padded: 8 rows are in different banks

// Receives the activations of up to act_slots k blocks of a span, from `block` on. By a warp.
template <bool kOne>
__device__ __forceinline__ void receive_acts(const FusedExpertsArgs& args, const Routing& routing,
                                             const ExpertSpan& span, int block, int num_blocks,
                                             char* to, uint32_t launch) {
  const int lane = threadIdx.x % 32, columns = kColumns<kOne>, steps = args.act_steps();
  const int pairs = count_of<kOne>(span), count = pairs * num_blocks;
#pragma unroll 1
  for (int first = 0; first < count; first += 2) {
    ulonglong2 sent[2];
    bool complete;
    do {
      complete = true;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = (first + i) / pairs, column = (first + i) % pairs;
        const int step = (block + slot * args.down.splits) * kSteps + lane / 4;
        sent[i] = {};
        if (first + i >= count || step >= steps) continue;
        const int pair = pair_of<kOne>(routing, span, column);
        sent[i] =
            ptx::load_relaxed8x2(args.acts + ((int64_t{pair} * steps + step) * 4 + lane % 4) * 2);
        const bool has_second = step * 16 + 8 < args.width;
        complete &= is_of(sent[i].x, launch) && (!has_second || is_of(sent[i].y, launch));
        if (!has_second) sent[i].y = 0;
      }
    } while (!complete);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i >= count) continue;
      const int slot = (first + i) / pairs, column = (first + i) % pairs;
      *reinterpret_cast<uint2*>(to + (slot * columns + column) * kActBytes + lane * 8) = {
          static_cast<uint32_t>(sent[i].x), static_cast<uint32_t>(sent[i].y)};
    }
  }
  __syncwarp();
}

// Multiplies the warp's parts of a round, and sends the sums of 16 rows each to the CTAs of the
// cluster. `results`: shared memory of result_place; `received`: its mbarrier.
template <bool kOne, typename T, typename Unpacker>
__device__ __forceinline__ void multiply_down(const FusedExpertsArgs& args, const Routing& routing,
                                              WarpStages<Unpacker>& stages, int round, char* acts,
                                              uint32_t results, uint32_t received,
                                              uint32_t launch) {
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int num_spans = *routing.num_active, parts = down_parts(args, num_spans);
  const int columns = kColumns<kOne>, splits = args.down.splits;
  Part part;
#pragma unroll 1
  for (int n = round * parts; n < (round + 1) * parts; ++n) {
    if (!down_part(args, num_spans, n, warp, part) || !part.has_blocks) continue;
    const ExpertSpan span = routing.spans[part.span];
    float sums[2][1][4] = {};
    int slot = 0, num_slots = 0;
#pragma unroll 1
    for (int block = part.split; block < args.down.k_blocks; block += splits) {
      if (slot == num_slots) {
        const int left = (args.down.k_blocks - block + splits - 1) / splits;
        slot = 0, num_slots = min(args.plan.act_slots, left);
        receive_acts<kOne>(args, routing, span, block, num_slots, acts, launch);
      }
      const char* from = acts + (slot * columns + g) * kActBytes + q * 8;
      stages.template multiply<T>(sums, args.down.form, [&](int step, uint32_t (&b)[2]) {
        const uint2 v =
            g < count_of<kOne>(span) ? *reinterpret_cast<const uint2*>(from + step * 32) : uint2{};
        b[0] = v.x, b[1] = v.y;
      });
      ++slot;
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int pair = pair_of<kOne>(routing, span, 2 * q + odd);
      if (pair < 0) continue;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint32_t to =
            ptx::cluster_address(results + 4 * (result_place(args, pair, part.split) + g), tile);
        const uint32_t barrier = ptx::cluster_address(received, tile);
        ptx::store_cluster4(to, sums[tile][0][odd], barrier);
        ptx::store_cluster4(to + 4 * 8, sums[tile][0][odd + 2], barrier);
      }
    }
  }
}

}  // namespace fused_experts_parts

}  // namespace
}  // namespace cpmcu::cuda
