// Common code of the Hopper GEMMs of sorted pairs: the order of tiles, and the epilogue.
#pragma once

#include "core/launch.h"
#include "kernels/gemm/large_tiles.cuh"
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/layer/silu.cuh"
#include "kernels/moe/sorted_gemm.h"

namespace cpmcu::cuda {
namespace {

// Shared memory of the stages and the epilogue; ExpertTiles needs 8 KB beside it.
constexpr int kSortedRingBytes = 218 * 1024;

struct SortedArgs {
  TensorMap x_map;
  void* y;             // [P, width]
  const int* pairs;    // as in Routing
  const int* offsets;  // as in Routing
  int num_experts;
  int k_blocks;  // stages that a tile takes
  int w_tiles;   // tiles of 256 rows in one expert's W
  int width;     // columns of y
  bool gated, float_out, sorted_y;
  float alpha;  // factor of the sums
};

// The tiles of all experts: 256 rows of an expert's W x kRows of its pairs. Their number is known
// on the device only. For each tile of W, the tiles of the expert's pairs follow each other, so W
// stays in L2.
template <int kRows>
struct ExpertTiles {
  struct Memory {
    int before[kMaxExperts + 1];  // number of tiles of pairs that belong to lower experts
    int offsets[kMaxExperts + 1];
    int of_warp[kLargeThreads / 32];
  };
  struct Place {
    int expert, w;
    int first, end;  // the sorted pairs [first, end)
  };
  const Memory& memory;
  int num_experts, w_tiles;

  // Called by all threads of the CTA, after pdl_wait().
  __device__ __forceinline__ ExpertTiles(Memory& memory, const SortedArgs& args)
      : memory(memory), num_experts(args.num_experts), w_tiles(args.w_tiles) {
    // A thread counts the tiles of consecutive experts.
    constexpr int kOwn = (kMaxExperts + kLargeThreads) / kLargeThreads;
    static_assert(kOwn * kLargeThreads > kMaxExperts);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int counts[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int expert = threadIdx.x * kOwn + i;
      counts[i] = 0;
      if (expert > num_experts) continue;
      const int begin = args.offsets[expert];
      memory.offsets[expert] = begin;
      if (expert == num_experts) continue;
      counts[i] = (args.offsets[expert + 1] - begin + kRows - 1) / kRows;
      sum += counts[i];
    }
    const int own = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) memory.of_warp[warp] = sum;
    __syncthreads();
    int before = sum - own;
    for (int i = 0; i < warp; ++i) before += memory.of_warp[i];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int expert = threadIdx.x * kOwn + i;
      if (expert <= num_experts) memory.before[expert] = before;
      before += counts[i];
    }
    __syncthreads();
  }
  __device__ __forceinline__ int count() const { return memory.before[num_experts] * w_tiles; }
  // The first tile of this cluster, and the distance to its next one.
  static __device__ __forceinline__ int first() { return blockIdx.x / 2; }
  static __device__ __forceinline__ int step() { return gridDim.x / 2; }

  __device__ __forceinline__ Place place(int tile) const {
    // The last expert with at most this many tiles of pairs before it. It has pairs.
    const int of_pairs = tile / w_tiles;
    int expert = 0, above = num_experts;
    while (above - expert > 1) {
      const int middle = (expert + above) / 2;
      (memory.before[middle] <= of_pairs ? expert : above) = middle;
    }
    const int before = memory.before[expert], own = memory.before[expert + 1] - before;
    const int in_expert = tile - before * w_tiles, w = in_expert / own;
    return {.expert = expert,
            .w = w,
            .first = memory.offsets[expert] + (in_expert - w * own) * kRows,
            .end = memory.offsets[expert + 1]};
  }
};

// Stores a warpgroup's sums straight from registers. Eight lanes write 32 bytes of a row of
// float32: whole sectors, so shared memory would gain nothing. `column`: the first stored row of W.
template <typename T, int kGroups>
__device__ __forceinline__ void store_sorted(const SortedArgs& args,
                                             const float (&sums)[kGroups][4], int first, int end,
                                             int column) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  column = args.gated ? column / 2 + warp * 8 + g : column + warp * 16 + g;
  const auto store = [&](auto* y, float value, int at) {
    using Y = std::remove_pointer_t<decltype(y)>;
    if (at < args.width) y[at] = from_float<Y>(value);
  };
  const auto store_rows = [&](auto* y) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int row = first + i / 2 * 8 + 2 * q + i % 2;
      if (row >= end) continue;
      const int to = args.sorted_y ? row : args.pairs[row];
      auto* const out = y + static_cast<int64_t>(to) * args.width;
      const float sum = args.alpha * sums[i / 2][i % 2],
                  sum_8 = args.alpha * sums[i / 2][i % 2 + 2];
      if (args.gated) {
        store(out, silu(sum) * sum_8, column);
      } else {
        store(out, sum, column);
        store(out, sum_8, column + 8);
      }
    }
  };
  args.float_out ? store_rows(static_cast<float*>(args.y)) : store_rows(static_cast<T*>(args.y));
}

// Writes y of one tile. Consecutive rows of 16 bits pass through `shared`. `column`: the
// warpgroup's first stored row of W.
template <typename T, int kGroups>
__device__ __forceinline__ void finish_tile(const SortedArgs& args, const float (&sums)[kGroups][4],
                                            uint32_t shared, int warpgroup, int first, int end,
                                            int column) {
  if (args.gated && args.sorted_y && !args.float_out) {
    const LargeOut<T> out(args.y, args.width, args.width, end, false);
    out.store_gated(sums, shared, warpgroup, first, column / 2, [&](float gate, float up) {
      return silu(args.alpha * gate) * (args.alpha * up);
    });
  } else {
    store_sorted<T>(args, sums, first, end, column);
  }
}

// ---- launchers

SortedArgs sorted_args(const SortedRows& rows, int64_t n, bool gated) {
  return {.x_map = {},
          .y = rows.y.data(),
          .pairs = rows.routing.pairs,
          .offsets = rows.routing.offsets,
          .num_experts = rows.routing.num_experts,
          .k_blocks = 0,
          .w_tiles = static_cast<int>((n + 255) / 256),
          .width = static_cast<int>(rows.y.size(1)),
          .gated = gated,
          .float_out = rows.y.dtype() == DType::kF32,
          .sorted_y = rows.sorted_y,
          .alpha = 1};
}

// Rows of a tile: 128 unless an expert has so few pairs that half of a tile would be empty. A tile
// of 64 takes 0.7 times as long. The choice changes no bit.
inline int rows_of_tile(const SortedRows& rows) {
  return rows.y.size(0) > int64_t{64} * rows.routing.num_experts ? 128 : 64;
}

// Clusters of two CTAs: as many as run at a time, at most the largest possible number of tiles.
inline int num_clusters(const Context& ctx, const SortedRows& rows, int w_tiles, int tile_rows) {
  const int64_t num_pairs = rows.y.size(0);
  const int64_t most =
      num_pairs / tile_rows + std::min<int64_t>(rows.routing.num_experts, num_pairs);
  return static_cast<int>(std::min<int64_t>(ctx.sm_count / 2, w_tiles * most));
}

}  // namespace
}  // namespace cpmcu::cuda
