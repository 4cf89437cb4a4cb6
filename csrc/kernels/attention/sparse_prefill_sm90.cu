// Attention of a prompt's tokens to their chosen blocks, for heads of 128 on Hopper.
//
// Roofline: between two extremes. If adjacent tokens choose alike, tensor cores limit: 96 blocks,
// 100 MFLOP a token and layer of MiniCPM4-8B, 0.15 us at 680 TFLOP/s. If they choose independently,
// L2 limits: the union of eight tokens has about 420 blocks at 64K tokens, 3.4 MB a token, 0.6 us.
//
// Schedule: a CTA has 128 packed rows of a KV head: the 16 heads of 8 tokens.
//   producer   one thread: TMA copies of the blocks of the rows' union, in ascending order
//   consumers  two warpgroups of 64 rows. A warpgroup skips blocks that none of its rows chose.
//   While one warpgroup computes a softmax, the other one multiplies.
//
// Surprising: a KV tile is one block, although two at a time would be faster. Which blocks come
// together would depend on the other tokens; so would the row maximum when probabilities are
// rounded, and the bits. A masked block alone changes no bit.
#include "kernels/attention/decode.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/attention/sparse_checks.h"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T>
struct SparsePrefill {
  static constexpr int kDim = 128, kPanels = kDim / 64;
  static constexpr int kRows = 128;  // packed rows of a CTA
  static constexpr int kGroupRows = 64;
  static constexpr int kGroups = kRows / kGroupRows;  // warpgroups that consume
  static constexpr int kStages = 4;
  static constexpr int kConsumerThreads = kGroups * 128, kThreads = kConsumerThreads + 128;
  // Registers of a thread. The launch gives 168 to each.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Tile = SwizzledTile<T, kPageSize, kDim>;

  // For the keys and the values of each stage. full: the copy has arrived. empty: all warps are
  // done.
  struct Barriers {
    uint64_t full[kStages][2], empty[kStages][2];
  };
  struct Smem {
    Tile tiles[kStages][2];                // keys, values
    SwizzledTile<T, kRows, kDim> queries;  // then the output
    PackedRows<kRows> packed;
    uint64_t of_group[kGroups][kMaxWords];  // blocks of a warpgroup's rows
    uint64_t any[kMaxWords];                // blocks of all rows
    Barriers barriers;
  };
};

// Tensor maps over the whole cache of a layer, as rows of D elements: [page, KV head, entry].
struct BlockMaps {
  TensorMap of[2];  // keys, values
};

// The work of a CTA. A tile is a block of the union; tiles are numbered from 0.
template <typename T>
struct SparseCta {
  using Config = SparsePrefill<T>;
  using Tile = typename Config::Tile;

  const AttentionArgs<T>& args;
  typename Config::Smem& smem;
  const Chunk& chunk;

  // Barriers and stage of a tile's keys (operand = 0) or values (operand = 1).
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
  // Calls use(tile, block) for each block of the union.
  template <typename Use>
  __device__ __forceinline__ void for_each_tile(Use use) const {
    const int end = args.selection_words * 64;
    int tile = 0;
#pragma unroll 1
    for (int block = next_block(smem.any, 0, end); block < end;
         block = next_block(smem.any, block + 1, end)) {
      use(tile++, block);
    }
  }
};

// The blocks of the rows' tokens at positions from `first_position` on.
template <typename T>
__device__ __forceinline__ void unite(const SparseCta<T>& cta, int first_position) {
  using Config = SparsePrefill<T>;
  const AttentionArgs<T>& args = cta.args;
  const Chunk& chunk = cta.chunk;
  for (int w = static_cast<int>(threadIdx.x); w < args.selection_words; w += Config::kThreads) {
    uint64_t any = 0;
    for (int group = 0; group < Config::kGroups; ++group) {
      const int begin = chunk.token_of(group * Config::kGroupRows);
      const int end =
          min(chunk.token_of((group + 1) * Config::kGroupRows - 1) + 1, chunk.seq.num_tokens);
      uint64_t of_group = 0;
      for (int token = begin; token < end; ++token) {
        const int row = chunk.seq.token_begin + token;
        if (args.tokens.positions[row] < first_position) continue;
        of_group |= selection_of(args, row, chunk.kv_head)[w];
      }
      cta.smem.of_group[group][w] = of_group;
      any |= of_group;
    }
    cta.smem.any[w] = any;
  }
}

// ---- the producer: one thread

template <typename T>
__device__ __forceinline__ void fetch_blocks(const SparseCta<T>& cta, const BlockMaps& maps) {
  using Config = SparsePrefill<T>;
  using Tile = typename Config::Tile;
  const Chunk& chunk = cta.chunk;
  cta.for_each_tile([&](int tile, int block) {
    const int page = page_of(cta.args.tokens, chunk.seq.slot, block * kPageSize);
    const int map_row = (page * cta.args.num_kv_heads + chunk.kv_head) * kPageSize;
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      ptx::mbarrier_wait(cta.empty(tile, operand), cta.parity_of(tile) ^ 1);
      ptx::mbarrier_expect_bytes(cta.full(tile, operand), sizeof(Tile));
      const uint32_t to = ptx::shared_address(cta.stage(tile, operand).data);
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        ptx::tensor_copy(to + panel * Tile::kPanelBytes, &maps.of[operand], panel * 64, map_row,
                         cta.full(tile, operand));
      }
    }
  });
}

// ---- the consumers: two warpgroups of 64 rows each

template <typename T>
struct SparseConsumer {
  using Config = SparsePrefill<T>;
  using Tile = typename Config::Tile;
  static constexpr int kDim = Config::kDim;
  static constexpr int kPanel = Tile::kPanelBytes / 16, kRow = Tile::kRowBytes / 16;

  using Queries = uint32_t[kDim / 16][4];
  using Scores = float[kPageSize / 8][4];

  const SparseCta<T>& cta;
  const int warp, lane;
  const uint64_t* words[2];  // of the lane's rows; null: the row needs no result
  int own[2];                // positions of the lane's rows

  __device__ __forceinline__ SparseConsumer(const SparseCta<T>& cta_, int warp_, int first_position)
      : cta(cta_), warp(warp_), lane(threadIdx.x % 32) {
    const AttentionArgs<T>& args = cta.args;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp * kWarpRows + half * 8 + lane / 4;
      const int row = cta.chunk.seq.token_begin + cta.chunk.token_of(p);
      const bool exists =
          cta.smem.packed.queries[p] >= 0 && args.tokens.positions[row] >= first_position;
      own[half] = exists ? args.tokens.positions[row] : -1;
      words[half] = exists ? selection_of(args, row, cta.chunk.kv_head) : nullptr;
    }
  }

  __device__ __forceinline__ void load_queries(Queries& queries) const {
    QueryCopy<Config::kConsumerThreads, T, Config::kRows, kDim> copy;
    copy.look_up(cta.smem.packed);
    copy.start(cta.smem.queries, cta.args.qkv);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::named_barrier<1, Config::kConsumerThreads>();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      load_fragment_a(queries[k16], cta.smem.queries, warp * kWarpRows, k16);
    }
  }
  __device__ __forceinline__ uint64_t descriptor(int tile, int operand) const {
    return ptx::wgmma_descriptor_swizzle128(ptx::shared_address(cta.stage(tile, operand).data));
  }
  __device__ __forceinline__ void wait(int tile, int operand) const {
    ptx::mbarrier_wait(cta.full(tile, operand), cta.parity_of(tile));
  }
  __device__ __forceinline__ void release(int tile, int operand) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(cta.empty(tile, operand));
  }

  // Hides the entries that the lane's rows do not see.
  __device__ __forceinline__ void hide(Scores& scores, int block) const {
    uint64_t sees[2];
    bool all = true, whole = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool chosen = words[half] != nullptr && has_block(words[half], block);
      sees[half] = chosen ? first_entries(own[half] + 1 - block * kPageSize) : 0;
      all = all && sees[half] == ~uint64_t{0};
      whole = whole && (sees[half] == 0 || sees[half] == ~uint64_t{0});
    }
    if (__all_sync(0xffffffffu, all)) return;
    if (!__all_sync(0xffffffffu, whole)) return mask_scores(scores, sees);
#pragma unroll
    for (int n = 0; n < kPageSize / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = sees[i / 2] != 0 ? scores[n][i] : kMinusInfinity;
    }
  }

  // Adds a block to the states of the warpgroup's rows.
  __device__ __forceinline__ void attend(RowTile<kDim>& rows, const Queries& queries, int tile,
                                         int block) const {
    Scores scores;
    wait(tile, 0);
    const uint64_t keys = descriptor(tile, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      ptx::wgmma_64xNx16<T, kPageSize / 8>(scores, queries[k16],
                                           keys + k16 / 4 * kPanel + k16 % 4 * 2, k16 > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    release(tile, 0);
    hide(scores, block);
    softmax_step(rows, scores, cta.args.scale_log2);
    uint32_t probabilities[kPageSize / 16][4];
#pragma unroll
    for (int k16 = 0; k16 < kPageSize / 16; ++k16) {
      pack_fragment_a<T>(probabilities[k16], scores, k16);
    }
    wait(tile, 1);
    if ((block + 1) * kPageSize > cta.chunk.seq.end()) clear_unseen_values(tile, block);
    const uint64_t values = descriptor(tile, 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kPageSize / 16; ++k16) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        auto& columns = *reinterpret_cast<float (*)[8][4]>(&rows.acc[8 * panel]);
        ptx::wgmma_64xNx16<T, 8, true>(columns, probabilities[k16],
                                       values + panel * kPanel + k16 * 16 * kRow, true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    release(tile, 1);
  }
  // Clears the values after the sequence's last entry. They may be NaN, and 0 * NaN is not 0.
  __device__ __forceinline__ void clear_unseen_values(int tile, int block) const {
    auto& values = cta.stage(tile, 1);
    const int num_chunks = ((block + 1) * kPageSize - cta.chunk.seq.end()) * (kDim / 8);
    for (int i = static_cast<int>(threadIdx.x) % 128; i < num_chunks; i += 128) {
      const int row = kPageSize - 1 - i / (kDim / 8);
      *reinterpret_cast<uint4*>(values.chunk(row, i % (kDim / 8))) = make_uint4(0, 0, 0, 0);
    }
    ptx::shared_copy_fence();
    warp < 4 ? ptx::named_barrier<2, 128>() : ptx::named_barrier<3, 128>();
  }
  __device__ __forceinline__ void attend_all(RowTile<kDim>& rows, const Queries& queries) const {
    const uint64_t* const of_group = cta.smem.of_group[warp / 4];
    cta.for_each_tile([&](int tile, int block) {
      if (has_block(of_group, block)) return attend(rows, queries, tile, block);
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
        wait(tile, operand);  // otherwise a warp could arrive twice in one phase
        release(tile, operand);
      }
    });
  }

  // The output of the warp replaces its query rows in shared memory. Stores then have 16 bytes.
  __device__ __forceinline__ void store_output(const RowTile<kDim>& rows) const {
    auto& output = cta.smem.queries;
    uint32_t needed = 0;  // bit r: row r of the warp needs its result
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_of(quad_sum(rows.sum[half]));
      const int row = warp * kWarpRows + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float (&acc)[4] = rows.acc[n];
        *reinterpret_cast<uint32_t*>(output.chunk(row, n) + lane % 4 * 2) =
            pack2<T>(normalised(acc[2 * half], inverse), normalised(acc[2 * half + 1], inverse));
      }
      if (words[half] != nullptr) needed |= 1u << (half * 8 + lane / 4);
    }
    needed = __reduce_or_sync(0xffffffffu, needed);
    __syncwarp();
    constexpr int kChunks = kDim / 8;
#pragma unroll
    for (int i = lane; i < kWarpRows * kChunks; i += 32) {
      const int row = warp * kWarpRows + i / kChunks;
      if ((needed >> (i / kChunks) & 1) == 0) continue;
      T* to = cta.args.out + static_cast<int64_t>(cta.smem.packed.outs[row]) * kDim;
      store(to + i % kChunks * 8, load<T, 8>(output.chunk(row, i % kChunks)));
    }
  }
};

// ---- kernels

// Grid: (chunks of packed rows * KV heads, 1, B).
template <typename T>
__global__ void __launch_bounds__(SparsePrefill<T>::kThreads, 1)
    sparse_prefill_sm90_kernel(const __grid_constant__ AttentionArgs<T> args,
                               const __grid_constant__ BlockMaps maps, int num_chunks,
                               int first_position) {
  using Config = SparsePrefill<T>;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(shared);
  const int warp = ptx::uniform_warp();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      for (int operand = 0; operand < 2; ++operand) {
        ptx::mbarrier_init(ptx::shared_address(&smem.barriers.full[i][operand]), 1);
        ptx::mbarrier_init(ptx::shared_address(&smem.barriers.empty[i][operand]),
                           Config::kConsumerThreads / 32);
      }
    }
    ptx::mbarrier_init_fence();
  }
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Chunk chunk(args, num_chunks, Config::kRows);
  const int last_token = min(chunk.token_of(Config::kRows - 1), chunk.seq.num_tokens - 1);
  if (chunk.first >= chunk.num_packed || chunk.seq.first_entry + last_token < first_position) {
    return;
  }
  const SparseCta<T> cta{args, smem, chunk};
  unite(cta, first_position);
  smem.packed.template load<false, Config::kDim>(args, chunk);
  __syncthreads();

  if (warp >= Config::kConsumerThreads / 32) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) fetch_blocks(cta, maps);
    return;
  }
  ptx::take_registers<Config::kConsumerRegisters>();
  const SparseConsumer<T> consumer(cta, warp, first_position);
  uint32_t queries[Config::kDim / 16][4];
  consumer.load_queries(queries);
  RowTile<Config::kDim> rows;
  rows.clear();
  consumer.attend_all(rows, queries);
  consumer.store_output(rows);
}

// ---- launchers

template <typename T>
void launch_sparse_prefill(const Context& ctx, const AttentionParams& p) {
  using Config = SparsePrefill<T>;
  using Smem = typename Config::Smem;
  const auto kernel = sparse_prefill_sm90_kernel<T>;
  const auto map = [&](const Tensor& cache) {
    const int rows = static_cast<int>(cache.size(0) * cache.size(1) * kPageSize);
    return make_map(cache.data(), rows, Config::kDim, cache.dtype(), kPageSize);
  };
  const int group = p.num_heads / p.num_kv_heads;
  const int num_chunks = (p.tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
  allow_shared_bytes(kernel, sizeof(Smem));
  launch(ctx, kernel, dim3(num_chunks * p.num_kv_heads, 1, p.tokens.num_seqs), Config::kThreads,
         sizeof(Smem), make_args<T>(p), BlockMaps{map(p.k_cache), map(p.v_cache)}, num_chunks,
         p.selection.dense_len);
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, slot_lengths,
// page_table, selection.
void sparse_prefill_sm90(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(),
                [&](auto element) { launch_sparse_prefill<decltype(element)>(ctx, params); });
}

}  // namespace cpmcu::cuda
