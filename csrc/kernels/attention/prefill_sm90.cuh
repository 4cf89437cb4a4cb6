// Common code of attention_prefill_sm90.cu and sparse_prefill_sm90.cu: the stages that TMA fills
// with keys and values, the GEMMs of a warpgroup, and the store of the output.
//
// A CTA has two warpgroups that consume and one that produces. Each consumer has 64 query rows.
#pragma once

#include "kernels/attention/fp8_copies.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {

// Tensor maps over the whole cache of a layer, as rows of D elements: [page, KV head, entry].
struct CacheMaps {
  TensorMap of[2];  // keys, values
};

inline CacheMaps make_cache_maps(const Tensor& k_cache, const Tensor& v_cache, int dim) {
  const auto map = [&](const Tensor& cache) {
    const int rows = static_cast<int>(cache.size(0) * cache.size(1) * kPageSize);
    return make_map(cache.data(), rows, dim, cache.dtype(), kPageSize);
  };
  return {map(k_cache), map(v_cache)};
}
// The same over copies of an fp8 cache, as rows of D elements: [pair, entry].
inline CacheMaps make_copy_maps(const Fp8Copies& copies, DType dtype, int dim) {
  const int rows = copies.num_seqs * copies.num_kv_heads * copies.entries;
  return {make_map(copies.rows[kKeys], rows, dim, dtype, kPageSize),
          make_map(copies.rows[kValues], rows, dim, dtype, kPageSize)};
}

// `kTileEntries_`: entries of a KV tile. `kRows`: query rows of a CTA.
template <typename T, int kTileEntries_, int kStages_>
struct HopperPrefill {
  static constexpr int kDim = 128, kPanels = kDim / 64;
  static constexpr int kRows = 128, kGroupRows = 64;
  static constexpr int kGroups = kRows / kGroupRows;  // warpgroups that consume
  static constexpr int kTileEntries = kTileEntries_;
  static constexpr int kPages = kTileEntries / kPageSize;
  static constexpr int kStages = kStages_;
  static constexpr int kConsumerThreads = kGroups * 128, kThreads = kConsumerThreads + 128;
  // Registers of a thread. The launch gives 168 to each.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Tile = SwizzledTile<T, kTileEntries, kDim>;
  using Rows = SwizzledTile<T, kRows, kDim>;
  using Queries = uint32_t[kDim / 16][4];
  using Scores = float[kTileEntries / 8][4];
  using Probabilities = uint32_t[kTileEntries / 16][4];

  // For the keys and the values of each stage. full: the copy has arrived. empty: all warps are
  // done.
  struct Barriers {
    uint64_t full[kStages][2], empty[kStages][2];

    __device__ __forceinline__ void init() {
      for (int i = 0; i < kStages; ++i) {
        for (int operand = 0; operand < 2; ++operand) {
          ptx::mbarrier_init(ptx::shared_address(&full[i][operand]), 1);
          ptx::mbarrier_init(ptx::shared_address(&empty[i][operand]), kConsumerThreads / 32);
        }
      }
      ptx::mbarrier_init_fence();
    }
  };
};

// The stages of a CTA's KV tiles, which are numbered from 0. operand: 0 = keys, 1 = values.
// Config::Smem has `tiles` and `barriers`.
template <typename Config>
struct KvStages {
  using Tile = typename Config::Tile;

  typename Config::Smem& smem;

  __device__ __forceinline__ uint32_t full(int tile, int operand) const {
    return ptx::shared_address(&smem.barriers.full[tile % Config::kStages][operand]);
  }
  __device__ __forceinline__ uint32_t empty(int tile, int operand) const {
    return ptx::shared_address(&smem.barriers.empty[tile % Config::kStages][operand]);
  }
  __device__ __forceinline__ static int parity_of(int tile) { return tile / Config::kStages % 2; }
  __device__ __forceinline__ Tile& stage(int tile, int operand) const {
    return smem.tiles[tile % Config::kStages][operand];
  }

  // The producer: waits for the stage and copies pages, which begin at these rows of the map.
  __device__ __forceinline__ void fetch(int tile, const CacheMaps& maps,
                                        const int (&map_rows)[Config::kPages]) const {
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      ptx::mbarrier_wait(empty(tile, operand), parity_of(tile) ^ 1);
      ptx::mbarrier_expect_bytes(full(tile, operand), sizeof(Tile));
      const uint32_t to = ptx::shared_address(stage(tile, operand).data);
#pragma unroll
      for (int i = 0; i < Config::kPages; ++i) {
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel) {
          ptx::tensor_copy(to + panel * Tile::kPanelBytes + i * kPageSize * Tile::kRowBytes,
                           &maps.of[operand], panel * 64, map_rows[i], full(tile, operand));
        }
      }
    }
  }
};

// A warp of a warpgroup that consumes.
template <typename Config>
struct KvConsumer {
  using Tile = typename Config::Tile;
  static constexpr int kDim = Config::kDim, kTileEntries = Config::kTileEntries;
  static constexpr int kPanel = Tile::kPanelBytes / 16, kRow = Tile::kRowBytes / 16;

  using T = typename Config::Element;
  using Queries = typename Config::Queries;
  using Scores = typename Config::Scores;
  using Probabilities = typename Config::Probabilities;

  const KvStages<Config>& stages;
  const int warp, lane;

  __device__ __forceinline__ uint64_t descriptor(int tile, int operand) const {
    return ptx::wgmma_descriptor_swizzle128(ptx::shared_address(stages.stage(tile, operand).data));
  }
  __device__ __forceinline__ void wait(int tile, int operand) const {
    ptx::mbarrier_wait(stages.full(tile, operand), stages.parity_of(tile));
  }
  __device__ __forceinline__ void release(int tile, int operand) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(stages.empty(tile, operand));
  }

  // The warp's query rows, once all consumers have started their copies to shared memory.
  __device__ __forceinline__ void read_queries(Queries& queries) const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::named_barrier<1, Config::kConsumerThreads>();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      load_fragment_a(queries[k16], stages.smem.queries, warp * 16, k16);
    }
  }
  // Starts the GEMM scores = queries * keys^T of a tile.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Queries& queries,
                                                int tile) const {
    wait(tile, 0);
    const uint64_t keys = descriptor(tile, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      ptx::wgmma_64xNx16<T, kTileEntries / 8>(scores, queries[k16],
                                              keys + k16 / 4 * kPanel + k16 % 4 * 2, k16 > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void pack(Probabilities& probabilities, const Scores& scores) const {
#pragma unroll
    for (int k16 = 0; k16 < kTileEntries / 16; ++k16) {
      pack_fragment_a<T>(probabilities[k16], scores, k16);
    }
  }
  // Starts the GEMM rows.acc += probabilities * values of a tile. The values have arrived.
  __device__ __forceinline__ void multiply_values(RowTile<kDim>& rows,
                                                  const Probabilities& probabilities,
                                                  int tile) const {
    const uint64_t values = descriptor(tile, 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kTileEntries / 16; ++k16) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        auto& columns = *reinterpret_cast<float (*)[8][4]>(&rows.acc[8 * panel]);
        ptx::wgmma_64xNx16<T, 8, true>(columns, probabilities[k16],
                                       values + panel * kPanel + k16 * 16 * kRow, true);
      }
    }
    ptx::wgmma_commit();
  }
  // Clears the last `count` values of a tile. They may be NaN, and 0 * NaN is not 0. The warpgroup
  // calls it together.
  __device__ __forceinline__ void clear_last_values(int tile, int count) const {
    auto& values = stages.stage(tile, 1);
    const int num_chunks = count * (kDim / 8);
    for (int i = static_cast<int>(threadIdx.x) % 128; i < num_chunks; i += 128) {
      const int row = kTileEntries - 1 - i / (kDim / 8);
      *reinterpret_cast<uint4*>(values.chunk(row, i % (kDim / 8))) = make_uint4(0, 0, 0, 0);
    }
    ptx::shared_copy_fence();
    warp < 4 ? ptx::named_barrier<2, 128>() : ptx::named_barrier<3, 128>();
  }
  // The output of the warp replaces its query rows in shared memory. Stores then have 16 bytes.
  // out_of(row): where row `row` of the CTA goes; null: nowhere.
  template <typename OutOf>
  __device__ __forceinline__ void store_output(const RowTile<kDim>& rows, OutOf out_of) const {
    auto& output = stages.smem.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_of(quad_sum(rows.sum[half]));
      const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float (&acc)[4] = rows.acc[n];
        *reinterpret_cast<uint32_t*>(output.chunk(row, n) + lane % 4 * 2) =
            pack2<T>(normalised(acc[2 * half], inverse), normalised(acc[2 * half + 1], inverse));
      }
    }
    __syncwarp();
    constexpr int kChunks = kDim / 8;
#pragma unroll
    for (int i = lane; i < 16 * kChunks; i += 32) {
      const int row = warp * 16 + i / kChunks;
      T* to = out_of(row);
      if (to != nullptr) store(to + i % kChunks * 8, load<T, 8>(output.chunk(row, i % kChunks)));
    }
  }
};

}  // namespace cpmcu::cuda
