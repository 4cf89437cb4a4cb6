// The pipeline through which packed_gemm_kernel gets weight blocks and rows of x, and the warp that
// fills its stages.
#pragma once

#include "kernels/gemm/packed/multiply.cuh"
#include "kernels/gemm/packed/sums.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kMaxStages = 12;
// Bytes for a block, rounded up so that x stays aligned.
template <typename Unpacker>
constexpr int kBlockRoom = (Unpacker::kBlock + Unpacker::kExtraBytes + 1023) / 1024 * 1024;

// Stages in shared memory: rows of x, then a weight block. Barriers: full (both have arrived),
// empty (all consumer warps are done with the stage).
template <typename Unpacker, int kGroups>
struct PackedRing {
  static constexpr int kXBytes = 8 * kGroups * kRowBytes,
                       kStageBytes = kXBytes + kBlockRoom<Unpacker>;
  static constexpr int kBarriers = 2 * kMaxStages;
  uint32_t data, barriers;
  uint32_t end;  // address behind the barriers in use

  __device__ __forceinline__ PackedRing(const void* data, const void* barriers, int stages)
      : data(ptx::shared_address(data)), barriers(ptx::shared_address(barriers)) {
    end = this->barriers + 8 * stages;
    ptx::opaque(this->data);  // so it is computed once
    ptx::opaque(this->barriers);
    ptx::opaque(end);
  }

  // Addresses of a stage and its barriers, and the phase parity.
  struct Stage {
    uint32_t rows, full;
    int parity;

    __device__ __forceinline__ uint32_t weights() const { return rows + kXBytes; }
    __device__ __forceinline__ uint32_t empty() const { return full + 8 * kMaxStages; }
  };
  __device__ __forceinline__ Stage stage(int index) const {
    return {data + index * kStageBytes, barriers + 8 * index, 0};
  }
  __device__ __forceinline__ void advance(Stage& at) const {
    at.rows += kStageBytes;
    at.full += 8;
    if (at.full == end) at = {data, barriers, at.parity ^ 1};
  }
};

// Loads still outstanding when this CTA triggers the next kernel (PDL). If the trigger is too
// early, the next kernel's loads compete with these; if too late, memory is idle.
template <int kGroups>
constexpr int kLoadsLeftAtTrigger = kGroups == 1 ? 3 : 0;

// Producer warp. It visits the k blocks [first_block, first_block + blocks_of_tile) of each tile.
// It loads weights into every free stage, and rows of x once earlier kernels are done. Before that
// it loads at most early_stages stages of weights, because rows of x queue behind them, and
// prefetches the next early_l2_blocks to L2.
template <typename Mma, typename Unpacker, int kGroups>
__device__ __forceinline__ void produce(const PackedGemmArgs& args,
                                        const PackedRing<Unpacker, kGroups>& ring, int first_tile,
                                        int tile_step, int first_block, int blocks_of_tile) {
  const int lane = threadIdx.x % 32, end = first_block + blocks_of_tile;
  const int num_tiles = args.rounds - (first_tile + (args.rounds - 1) * tile_step >= args.tiles);
  const int num_iterations = num_tiles * blocks_of_tile;
  const uint64_t policy = ptx::evict_first_policy();
  int left = num_iterations;  // weight blocks that are not requested yet
  if (left <= kLoadsLeftAtTrigger<kGroups>) ptx::pdl_launch();
  // Place of the next loads.
  int tile = first_tile, weights_block = first_block, rows_block = first_block;

  using Stage = typename PackedRing<Unpacker, kGroups>::Stage;
  const auto next_weights = [&] {
    return args.blocks + (int64_t{tile} * args.k_blocks + weights_block) * args.block_bytes;
  };
  const auto produce_weights = [&](const Stage& stage) {
    const uint32_t full = stage.full, to = stage.weights();
    const char* from = next_weights();
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      ptx::mbarrier_expect_bytes(full, args.block_bytes + (Mma::kTensorMap ? ring.kXBytes : 0));
      ptx::bulk_copy(to, from, args.block_bytes, full, policy);
    }
#else
    for (int byte = lane * 16; byte < args.block_bytes; byte += 32 * 16) {
      ptx::cp_async16(to + byte, from + byte);
    }
    if (lane == 0) ptx::mbarrier_arrive(full);
#endif
    if (++weights_block == end) weights_block = first_block, tile += tile_step;
    if (--left == kLoadsLeftAtTrigger<kGroups>) ptx::pdl_launch();
  };
  const auto produce_rows = [&](const Stage& stage) {
    const uint32_t full = stage.full, to = stage.rows;
    int k_block = rows_block;
    if (k_block >= args.plane_k_blocks) k_block -= args.plane_k_blocks;
    if constexpr (Mma::kTensorMap) {
      if (lane == 0) copy_rows<kGroups>(to, &args.x_map, k_block, full);
    } else {
      copy_rows_async<kGroups>(to, args.x, args.m, args.k, k_block);
      ptx::mbarrier_arrive_cp_async(full);
    }
    if (++rows_block == end) rows_block = first_block;
  };

  if constexpr (Mma::kTensorMap) ptx::prefetch_map(&args.x_map);
  const int first = min(args.stages, num_iterations), early_stages = min(args.early_stages, first);
#pragma unroll 1
  for (int i = 0; i < early_stages; ++i) produce_weights(ring.stage(i));
  const char* ahead = next_weights();
  const int ahead_bytes =
      left == 0 ? 0 : min(args.early_l2_blocks, end - weights_block) * args.block_bytes;
#pragma unroll 1
  for (int byte = lane * 128; byte < ahead_bytes; byte += 32 * 128) ptx::prefetch_l2(ahead + byte);
  ptx::pdl_wait();
#pragma unroll 1
  for (int i = 0; i < first; ++i) {
    if (i >= early_stages) produce_weights(ring.stage(i));
    produce_rows(ring.stage(i));
  }
  Stage stage = ring.stage(0);
#pragma unroll 1
  for (int i = first; i < num_iterations; ++i) {
    ptx::mbarrier_wait(stage.empty(), stage.parity);
    produce_weights(stage);
    produce_rows(stage);
    ring.advance(stage);
  }
  if constexpr (!Mma::kTensorMap) {  // no copies in flight when the warp ends
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
}

}  // namespace
}  // namespace cpmcu::cuda
