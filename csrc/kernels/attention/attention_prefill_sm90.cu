// attention_prefill on Hopper, for heads of 128 dimensions, causal, without a window.
//
//   out[t, h] = softmax(scale * q[t, h] K^T) V, with K and V of KV head h / group
//
// Roofline: 4 * tokens * entries * D operations for each query head, on tensor cores. Example: a
// layer of MiniCPM4-8B, 2048 tokens after 30000 cached ones: 1 TFLOP, 1.5 ms at 680 TFLOP/s. K and
// V of a KV tile (128 entries) are 64 KB from L2 for 8.4 MFLOP, which suffices with 128 query rows.
//
// Schedule: a CTA has 128 query rows of one (sequence, query head).
//   producer   one thread of a third warpgroup: TMA copies of pages of K and V, two stages
//   consumers  two warpgroups of 64 rows: queries, scores of 128 entries and output in registers
//   KV tiles are two pages each, in ascending order from entry 0.
//
// Surprising: each softmax overlaps a GEMM of the same warps. For tile t, a warpgroup issues the
// GEMM for the scores of t, then the GEMM for probabilities * values of t - 1. It waits for the
// first only. The softmax of t runs during the second. One warpgroup alone keeps its tensor cores
// busy; the other fills the gaps.
//
// An entry that a row does not see changes no bit of the row. Therefore the bits do not depend on
// the prefill chunk (tiles.cuh).
#include "kernels/attention/tiles.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T>
struct HopperPrefill {
  static constexpr int kDim = 128, kPanels = kDim / 64;
  static constexpr int kRows = 128;         // query rows of a CTA
  static constexpr int kTileEntries = 128;  // entries of a KV tile
  static constexpr int kPages = kTileEntries / kPageSize;
  static constexpr int kStages = 2;
  static constexpr int kConsumerThreads = 256, kThreads = kConsumerThreads + 128;
  // Registers of a thread. The launch gives 168 to each.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Tile = SwizzledTile<T, kTileEntries, kDim>;

  // For the keys and the values of each stage. full: the copy has arrived. empty: all warps are
  // done.
  struct Barriers {
    uint64_t full[kStages][2], empty[kStages][2];
  };
  struct Smem {
    Tile tiles[kStages][2];                // keys, values
    SwizzledTile<T, kRows, kDim> queries;  // then the output
    Barriers barriers;
  };
};

// Tensor maps over the whole cache of a layer, as rows of D elements: [page, KV head, entry].
struct CacheMaps {
  TensorMap of[2];  // keys, values
};

// The work of a CTA: the query rows of one (sequence, query head), and the stage of each KV tile.
template <typename T>
struct PrefillCta {
  using Config = HopperPrefill<T>;
  using Tile = typename Config::Tile;
  static constexpr int kTileEntries = Config::kTileEntries;

  const AttentionArgs<T>& args;
  typename Config::Smem& smem;
  const Sequence& seq;
  const int cta_row;  // the CTA's first row within the sequence
  const int head = blockIdx.x;
  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const int cta_rows = min(Config::kRows, seq.num_tokens - cta_row);
  const int entry_end = seq.length + cta_row + cta_rows;  // end of the entries that some row sees
  const int num_tiles = (entry_end + kTileEntries - 1) / kTileEntries;

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
};

// ---- the producer: one thread

template <typename T>
__device__ __forceinline__ void fetch_entries(const PrefillCta<T>& cta, const CacheMaps& maps) {
  using Config = HopperPrefill<T>;
  using Tile = typename Config::Tile;
  const StepTokens& tokens = cta.args.tokens;
  const int* pages = tokens.page_table + static_cast<int64_t>(cta.seq.slot) * tokens.max_pages;
  const int last_page = (cta.entry_end - 1) / kPageSize;
  int map_rows[Config::kPages];  // rows of the tensor map where this tile's pages begin
  const auto look_up = [&](int tile) {
#pragma unroll
    for (int i = 0; i < Config::kPages; ++i) {
      const int page = pages[min(tile * Config::kPages + i, last_page)];
      map_rows[i] = (page * cta.args.num_kv_heads + cta.kv_head) * kPageSize;
    }
  };
  look_up(0);
#pragma unroll 1
  for (int tile = 0; tile < cta.num_tiles; ++tile) {
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      ptx::mbarrier_wait(cta.empty(tile, operand), cta.parity_of(tile) ^ 1);
      ptx::mbarrier_expect_bytes(cta.full(tile, operand), sizeof(Tile));
      const uint32_t to = ptx::shared_address(cta.stage(tile, operand).data);
#pragma unroll
      for (int i = 0; i < Config::kPages; ++i) {
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel) {
          ptx::tensor_copy(to + panel * Tile::kPanelBytes + i * kPageSize * Tile::kRowBytes,
                           &maps.of[operand], panel * 64, map_rows[i], cta.full(tile, operand));
        }
      }
    }
    look_up(tile + 1);
  }
}

// ---- the consumers: two warpgroups of 64 rows each

template <typename T>
struct PrefillConsumer {
  using Config = HopperPrefill<T>;
  using Tile = typename Config::Tile;
  static constexpr int kDim = Config::kDim, kTileEntries = Config::kTileEntries;
  static constexpr int kPanel = Tile::kPanelBytes / 16, kRow = Tile::kRowBytes / 16;

  using Queries = uint32_t[kDim / 16][4];
  using Scores = float[kTileEntries / 8][4];
  using Probabilities = uint32_t[kTileEntries / 16][4];

  const PrefillCta<T>& cta;
  const int warp, lane;

  __device__ __forceinline__ void load_queries(Queries& queries) const {
    const AttentionArgs<T>& args = cta.args;
    const int64_t stride = args.qkv_row;
    fetch_tile<Config::kConsumerThreads>(
        cta.smem.queries,
        args.qkv + (cta.seq.token_begin + cta.cta_row) * stride + cta.head * args.q_head, stride,
        cta.cta_rows);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::named_barrier<1, Config::kConsumerThreads>();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      load_fragment_a(queries[k16], cta.smem.queries, warp * 16, k16);
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
  // Replaces the scores of a tile by probabilities in float32 and updates the rows' sums.
  __device__ __forceinline__ void softmax_tile(RowTile<kDim>& rows, Scores& scores,
                                               float (&factor)[2], int tile) const {
    const int warp_row = cta.cta_row + warp * 16;
    // Number of the tile's entries that the warp's first row sees.
    const int seen = cta.seq.length + warp_row + 1 - tile * kTileEntries;
    if (seen < kTileEntries) {
#pragma unroll
      for (int n = 0; n < kTileEntries / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int entry = n * 8 + lane % 4 * 2 + i % 2;
          if (entry >= seen + lane / 4 + i / 2 * 8) scores[n][i] = kMinusInfinity;
        }
      }
    }
    add_scores(rows, scores, cta.args.scale_log2, factor);
  }
  __device__ __forceinline__ void pack(Probabilities& probabilities, const Scores& scores) const {
#pragma unroll
    for (int k16 = 0; k16 < kTileEntries / 16; ++k16) {
      pack_fragment_a<T>(probabilities[k16], scores, k16);
    }
  }

  // All tiles in order. The keys of a tile are multiplied together with the values of the previous
  // one.
  __device__ __forceinline__ void attend(RowTile<kDim>& rows, const Queries& queries) const {
    Scores scores;
    Probabilities probabilities;
    float factor[2];
    multiply_keys(scores, queries, 0);
    ptx::wgmma_wait<0>();
    release(0, 0);
    softmax_tile(rows, scores, factor, 0);
    pack(probabilities, scores);
#pragma unroll 1
    for (int tile = 1; tile < cta.num_tiles; ++tile) {
      multiply_keys(scores, queries, tile);
      wait(tile - 1, 1);
      multiply_values(rows, probabilities, tile - 1);
      ptx::wgmma_wait<1>();
      release(tile, 0);
      softmax_tile(rows, scores, factor, tile);
      ptx::wgmma_wait<0>();
      release(tile - 1, 1);
      if (is_not_one(factor)) rows.multiply(factor);
      pack(probabilities, scores);
    }
    const int last = cta.num_tiles - 1;
    wait(last, 1);
    clear_unseen_values(last);
    multiply_values(rows, probabilities, last);
    ptx::wgmma_wait<0>();
  }
  // Clears the values after the last entry. They may be NaN, and 0 * NaN is not 0.
  __device__ __forceinline__ void clear_unseen_values(int last) const {
    auto& values = cta.stage(last, 1);
    const int num_chunks = (cta.num_tiles * kTileEntries - cta.entry_end) * (kDim / 8);
    for (int i = threadIdx.x % 128; i < num_chunks; i += 128) {
      const int row = kTileEntries - 1 - i / (kDim / 8);
      *reinterpret_cast<uint4*>(values.chunk(row, i % (kDim / 8))) = make_uint4(0, 0, 0, 0);
    }
    ptx::shared_copy_fence();
    warp < 4 ? ptx::named_barrier<2, 128>() : ptx::named_barrier<3, 128>();
  }

  // The output of the warp replaces its query rows in shared memory. Stores then have 16 bytes.
  __device__ __forceinline__ void store_output(const RowTile<kDim>& rows) const {
    auto& output = cta.smem.queries;
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
      if (row < cta.cta_rows) {
        const int64_t t = cta.seq.token_begin + cta.cta_row + row;
        T* to = cta.args.out + (t * cta.args.num_heads + cta.head) * kDim;
        store(to + i % kChunks * 8, load<T, 8>(output.chunk(row, i % kChunks)));
      }
    }
  }
};

// ---- kernels

template <typename T>
__global__ void __launch_bounds__(HopperPrefill<T>::kThreads, 1)
    attention_prefill_sm90_kernel(const __grid_constant__ AttentionArgs<T> args,
                                  const __grid_constant__ CacheMaps maps) {
  using Config = HopperPrefill<T>;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(shared);
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;

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
  __syncthreads();
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Sequence seq = load_sequence(args.tokens, blockIdx.z);
  const int cta_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kRows;
  if (cta_row >= seq.num_tokens || seq.first_entry + cta_row >= args.end_position) return;
  const PrefillCta<T> cta{args, smem, seq, cta_row};

  if (warp >= Config::kConsumerThreads / 32) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) fetch_entries(cta, maps);
    return;
  }
  ptx::take_registers<Config::kConsumerRegisters>();
  const PrefillConsumer<T> consumer{cta, warp, lane};
  uint32_t queries[Config::kDim / 16][4];
  consumer.load_queries(queries);
  RowTile<Config::kDim> rows;
  rows.clear();
  consumer.attend(rows, queries);
  consumer.store_output(rows);
}

// ---- launchers

template <typename T>
void launch_prefill(const Context& ctx, const AttentionParams& p) {
  using Config = HopperPrefill<T>;
  const auto kernel = attention_prefill_sm90_kernel<T>;
  const auto map = [&](const Tensor& cache) {
    const int rows = static_cast<int>(cache.size(0) * cache.size(1) * kPageSize);
    return make_map(cache.data(), rows, Config::kDim, cache.dtype(), kPageSize);
  };
  allow_shared_bytes(kernel, sizeof(typename Config::Smem));
  const int row_tiles = (p.tokens.max_seq_tokens + Config::kRows - 1) / Config::kRows;
  launch(ctx, kernel, dim3(p.num_heads, row_tiles, p.tokens.num_seqs), dim3(Config::kThreads),
         sizeof(typename Config::Smem), make_args<T>(p), CacheMaps{map(p.k_cache), map(p.v_cache)});
}

}  // namespace

void attention_prefill_sm90(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(),
                [&](auto element) { launch_prefill<decltype(element)>(ctx, params); });
}

}  // namespace cpmcu::cuda
