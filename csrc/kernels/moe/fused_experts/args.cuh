// The arguments of fused_experts_kernel, its messages, and which part of the work a warp has.
#pragma once

#include "core/ptx.cuh"
#include "kernels/gemm/packed/block.cuh"
#include "kernels/moe/moe_route.h"
#include "kernels/moe/router_norm.cuh"

namespace cpmcu::cuda {
namespace {

namespace fused_experts_parts {

constexpr int kCtaGroups = 3;  // groups of 8 warps
constexpr int kCtaWarps = kWarps * kCtaGroups;
constexpr int kConsumers = 32 * kCtaWarps;
constexpr int kCtaThreads = kConsumers + 32;  // and a producer warp
constexpr int kMaxStages = 8;                 // of a consumer warp
constexpr int kClusterWarps = 2 * kCtaWarps;
constexpr int kTokens = 8;    // at most
constexpr int kOwnRows = 16;  // numbers of a row of y that a CTA adds in a round
constexpr int kMaxRounds = 4;
constexpr int kRound = 1024;  // what a launch adds to `arrivals`; more than the CTAs of a grid
constexpr int kSteps = kPackedK / 16;

// Gate and up, or down, of all experts.
struct ExpertMatrix {
  const char* blocks;  // of expert 0
  int64_t stride;      // bytes from one expert to the next
  int k_blocks, block_bytes;
  int tiles;   // warp tiles of an expert
  int splits;  // warps that share K, as in packed_expert_gemm
  uint8_t form;

  __device__ __forceinline__ const char* tile_blocks(int expert, int tile) const {
    return blocks + expert * stride +
           static_cast<int64_t>(tile / kWarpTiles) * k_blocks * block_bytes;
  }
};

// Offsets in dynamic shared memory. The stages are at 0.
struct SharedPlan {
  int x, groups, group_bytes, act_slots, results, results_round, owned, routing, bytes;
};

struct FusedExpertsArgs {
  RowsNorm norm;
  const void* router_w;  // [E, k]
  ExpertMatrix gate_up, down;
  void* hidden;  // [T, k]
  void* normed;  // [T, k]; null: no next norm
  const void* next_weight;
  float next_eps, next_offset, scale, alpha;
  int m, k, width;  // tokens; H; I
  int num_experts, top_k;
  bool renormalise;
  int stages;  // of a warp
  int rounds;  // of slabs of 32 rows of down
  SharedPlan plan;
  uint64_t* arrivals;
  uint64_t *logits, *acts, *squares;  // messages: [T, E], [P, I / 16, 4, 2], [T, k / 8]

  template <bool kOne>
  __device__ __forceinline__ int tokens() const {
    return kOne ? 1 : m;
  }
  __device__ __forceinline__ int act_steps() const { return (width + 15) / 16; }
};

__device__ __forceinline__ uint64_t message(uint32_t launch, uint32_t value) {
  return uint64_t{launch} << 32 | value;
}
__device__ __forceinline__ bool is_of(uint64_t message, uint32_t launch) {
  return message >> 32 == launch;
}

// A warp's part of a unit of work: k blocks split, split + splits, ... of a warp tile.
struct Part {
  int span, tile, split;
  bool has_blocks;
};

// Part n of gate and up of a warp. False: there are no more.
__device__ __forceinline__ bool gate_up_part(const FusedExpertsArgs& args, int num_spans, int n,
                                             int warp, Part& part) {
  const ExpertMatrix& w = args.gate_up;
  const int tiles = kWarps / w.splits, units = (w.tiles + tiles - 1) / tiles;  // of an expert
  const int unit = blockIdx.x + (n * kCtaGroups + warp / kWarps) * gridDim.x;
  if (unit >= num_spans * units) return false;
  part.span = unit / units;
  part.tile = unit % units * tiles + warp % kWarps / w.splits;
  part.split = warp % w.splits;
  part.has_blocks = part.tile < w.tiles;
  return true;
}

// The parts of a warp in a round of down.
__device__ __forceinline__ int down_parts(const FusedExpertsArgs& args, int num_spans) {
  return (num_spans * args.down.splits + kClusterWarps - 1) / kClusterWarps;
}

// Part n of down of a warp. False: there are no more.
__device__ __forceinline__ bool down_part(const FusedExpertsArgs& args, int num_spans, int n,
                                          int warp, Part& part) {
  const ExpertMatrix& w = args.down;
  const int parts = down_parts(args, num_spans), in_round = n % parts;
  part.tile = blockIdx.x / 2 + n / parts * (gridDim.x / 2);
  if (part.tile >= w.tiles) return false;
  // Splits with more k blocks go round the warps.
  const int item =
      kClusterWarps * in_round + (2 * warp + blockIdx.x % 2 + in_round) % kClusterWarps;
  part.span = item / w.splits;
  part.split = item % w.splits;
  part.has_blocks = item < num_spans * w.splits;
  return true;
}

// The columns of a product: pairs of an expert. With one token (kOne), an expert has one pair.
template <bool kOne>
constexpr int kColumns = kOne ? 1 : kTokens;
template <bool kOne>
__device__ __forceinline__ int count_of(const ExpertSpan& span) {
  return kOne ? 1 : span.count;
}
// The pair that is column `column` of the products of a span. -1: none.
template <bool kOne>
__device__ __forceinline__ int pair_of(const Routing& routing, const ExpertSpan& span, int column) {
  if constexpr (kOne) return column == 0 ? span.pair : -1;
  return column < span.count ? routing.pairs[span.begin + column] : -1;
}

// The sums of a round of down: [pair][split][own row].
__device__ __forceinline__ int result_place(const FusedExpertsArgs& args, int pair, int split) {
  return (pair * args.down.splits + split) * kOwnRows;
}

// The column of y of own number 0 in a round.
__device__ __forceinline__ int own_column(int round) {
  return (static_cast<int>(blockIdx.x) / 2 + round * static_cast<int>(gridDim.x / 2)) * 32 +
         static_cast<int>(blockIdx.x) % 2 * kOwnRows;
}

}  // namespace fused_experts_parts

}  // namespace
}  // namespace cpmcu::cuda
