// The producer warp of fused_experts: copies the weight blocks of each consumer warp to its stages.
#pragma once

#include <climits>

#include "kernels/moe/expert_blocks.cuh"
#include "kernels/moe/fused_experts/args.cuh"

namespace cpmcu::cuda {
namespace {

namespace fused_experts_parts {

// Two mbarriers for each stage of a warp.
struct Barriers {
  static constexpr int kOfWarp = 2 * kMaxStages;

  static __device__ __forceinline__ uint32_t full(uint32_t of_warp, int stage) {
    return of_warp + 8 * stage;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t of_warp, int stage) {
    return of_warp + 8 * (kMaxStages + stage);
  }
};

// Requests a warp tile of a weight block.
template <typename Unpacker>
__device__ __forceinline__ void request_warp_tile(uint32_t stage, const char* block, int tile,
                                                  uint8_t form, uint32_t barrier, uint64_t policy) {
  constexpr int kBytes = kWarpTileBytes<Unpacker>;
  const int row = tile * kWarpTileRows;
  const int scales = Unpacker::scale_bytes(form) / kWarpTiles;
  const int tile_data = Unpacker::tile_bytes(form) / kWarpTiles;
  ptx::mbarrier_expect_bytes(barrier, kBytes + scales + tile_data);
  ptx::bulk_copy(stage, block + tile * kBytes, kBytes, barrier, policy);
  ptx::bulk_copy(stage + kBytes, block + kScaleOffset<Unpacker> + Unpacker::scale_place(row, form),
                 scales, barrier, policy);
  if (tile_data > 0) {
    ptx::bulk_copy(stage + kBytes + scales,
                   block + Unpacker::kTileOffset + row * Unpacker::tile_row_bytes(form), tile_data,
                   barrier, policy);
  }
}

// Requests the blocks of consumer warp `lane`, for gate and up, then for down, in the order of use.
// By the producer warp; lanes from kCtaWarps on are idle.
template <typename Unpacker>
__device__ __forceinline__ void load_weights(const FusedExpertsArgs& args, const Routing& routing,
                                             uint32_t stages, uint32_t barriers) {
  const int warp = threadIdx.x % 32;
  if (warp >= kCtaWarps) return;
  const uint64_t policy = ptx::evict_first_policy();
  const uint32_t own_stages = stages + warp * args.stages * sizeof(Stage<Unpacker>);
  const uint32_t own_barriers = barriers + warp * Barriers::kOfWarp * 8;
  const int num_spans = *routing.num_active;
  int stage = 0, parity = 1;  // a new barrier has completed the phase before its first one
#pragma unroll 1
  for (int phase = 0; phase < 2; ++phase) {
    const ExpertMatrix& w = phase == 0 ? args.gate_up : args.down;
    Part part;
#pragma unroll 1
    for (int n = 0; phase == 0 ? gate_up_part(args, num_spans, n, warp, part)
                               : down_part(args, num_spans, n, warp, part);
         ++n) {
      if (!part.has_blocks) continue;
      const char* blocks = w.tile_blocks(routing.spans[part.span].expert, part.tile);
#pragma unroll 1
      for (int block = part.split; block < w.k_blocks; block += w.splits) {
        ptx::mbarrier_wait(Barriers::empty(own_barriers, stage), parity);
        request_warp_tile<Unpacker>(own_stages + stage * sizeof(Stage<Unpacker>),
                                    blocks + int64_t{block} * w.block_bytes, part.tile % kWarpTiles,
                                    w.form, Barriers::full(own_barriers, stage), policy);
        if (++stage == args.stages) stage = 0, parity ^= 1;
      }
    }
  }
}

}  // namespace fused_experts_parts

}  // namespace
}  // namespace cpmcu::cuda
