// attention_prefill: attention of any number of tokens of a sequence over the paged cache.
//
//   out[t, h] = softmax(scale * q[t, h] K^T) V, with K and V of KV head h / group
//
// Roofline: 4 * tokens * entries * D operations for each query head, on tensor cores. A warp has 32
// query rows, so each fragment of K and V in shared memory serves two mma. Otherwise shared memory
// (128 bytes a clock) would be the limit. For the same reason Q stays in shared memory: its
// registers hold the accumulators of the 32 rows.
//
// Schedule: a CTA has one sequence, one query head, and a tile of 128 query rows (64 if D = 256),
// 32 (16) for each of four warps.
//   1. Fetch the queries and the first KV tile: one page, or half a page if D = 256.
//   2. For each KV tile in ascending order: wait, start the next copy, then compute scores, the
//      softmax step, and probabilities * values (flash attention).
//   3. Normalise and store.
// Row tiles start from the last (longest) to the first, and query heads vary fastest. CTAs that run
// together share K and V in L2, and the shortest CTAs start last.
//
// Surprising: KV tiles begin at multiples of the tile size from entry 0, not at the start of the
// chunk. The bits of a row then do not depend on the prefill chunk, so prefix caching and chunk
// size change no output. P is rounded to the model's dtype for P V; the sum of P is not. With a
// window, the CTA skips tiles before the window of its first row, because they would not change the
// state.
#include "core/dispatch.h"
#include "kernels/attention/fp8_tiles.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_ = false, bool kSinks_ = false>
struct PrefillConfig {
  using Element = T;
  static constexpr bool kSinks = kSinks_;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kDim <= 128 ? 2 : 1;       // m16 tiles of a warp
  static constexpr int kTileEntries = kDim <= 128 ? 64 : 32;  // entries of a KV tile
  static constexpr int kMinCtas = 2;                          // CTAs that fit on one SM
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kRows = kWarps * kWarpRows;  // query rows of a CTA
  static constexpr int kStages = 2;
  static_assert(kPageSize % kTileEntries == 0, "a KV tile must lie in one page");
};

template <typename Config>
struct PrefillSmem {
  using Tile =
      CacheTile<typename Config::Element, Config::kFp8, Config::kTileEntries, Config::kDim>;
  // The output replaces them at the end.
  SwizzledTile<typename Config::Element, Config::kRows, Config::kDim> queries;
  Tile keys[Config::kStages];
  Tile values[Config::kStages];
  Sequence sequence;  // in shared memory: saves registers of the main loop
};

// ---- the work of a CTA

template <typename Config>
struct PrefillCta {
  using T = typename Config::Element;
  static constexpr int kDim = Config::kDim, kTileEntries = Config::kTileEntries,
                       kRowTiles = Config::kRowTiles;

  const AttentionArgs<T>& args;
  PrefillSmem<Config>& smem;
  const Sequence& seq;
  const int cta_row;  // the CTA's first row within the sequence
  const int head = blockIdx.x;
  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const int cta_rows = min(Config::kRows, seq.num_tokens - cta_row);
  const uint64_t* const masks = args.tokens.ancestor_masks == nullptr
                                    ? nullptr
                                    : args.tokens.ancestor_masks + seq.token_begin;
  // Entries that some row of the CTA may see.
  const int entry_end = masks == nullptr ? seq.length + cta_row + cta_rows : seq.end();

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warp_row = cta_row + warp * Config::kWarpRows;
  // Entries that every row of this warp sees, and entries that at least one of its rows may see.
  // End of the entries that the warp's first row sees without masks.
  const int seen_by_first = seq.length + warp_row + 1;
  const int full_entries = masks == nullptr ? seen_by_first : seq.length;
  const int warp_entries =
      min(entry_end, masks == nullptr ? seen_by_first + Config::kWarpRows - 1 : entry_end);
  const int some_entries = warp_row < seq.num_tokens ? warp_entries : 0;
  const int first_tile = window_begin(seq.first_entry + cta_row, args.window) / kTileEntries;
  const int* const pages =
      args.tokens.page_table + static_cast<int64_t>(seq.slot) * args.tokens.max_pages;

  __device__ __forceinline__ int page_of(int tile) const {
    return pages[min(tile * kTileEntries, entry_end - 1) / kPageSize];
  }
  __device__ __forceinline__ void fetch_queries() const {
    const int64_t stride = args.qkv_row;
    const T* source = args.qkv + (seq.token_begin + cta_row) * stride + head * args.q_head;
    fetch_tile<Config::kThreads>(smem.queries, source, stride, cta_rows);
  }
  __device__ __forceinline__ void fetch_entries(int tile, int64_t page) const {
    const int entry = tile * kTileEntries;
    const int64_t offset =
        ((page * args.num_kv_heads + kv_head) * kPageSize + entry % kPageSize) * kDim;
    const int stage = tile % Config::kStages;
    fetch_cache<Config::kThreads>(smem.keys[stage], args, kKeys, offset, entry_end - entry,
                                  threadIdx.x);
    fetch_cache<Config::kThreads>(smem.values[stage], args, kValues, offset, entry_end - entry,
                                  threadIdx.x);
  }

  // The first entry in the window of a token of the sequence.
  __device__ __forceinline__ int window_of(int row) const {
    return args.window > 0 ? window_begin(smem.sequence.first_entry + row, args.window) : 0;
  }
  // The visibility of the 64 entries from `entry` on to a token of the sequence.
  __device__ __forceinline__ uint64_t entries_of_token(int row, int entry) const {
    const uint64_t sees = masks == nullptr
                              ? first_entries(smem.sequence.length + row + 1 - entry)
                              : seen_entries(row < smem.sequence.num_tokens ? masks[row] : 0,
                                             smem.sequence.length, entry);
    return sees & ~first_entries(window_of(row) - entry);
  }

  // Adds a KV tile to the states of this warp's rows.
  __device__ __forceinline__ void attend(RowTile<kDim> (&rows)[kRowTiles], int tile) const {
    const int entry = tile * kTileEntries;
    const int stage = tile % Config::kStages;
    float scores[kRowTiles][kTileEntries / 8][4];
    multiply_keys<T>(scores, smem.keys[stage], 0, [&](uint32_t (&q)[kRowTiles][4], int k16) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_fragment_a(q[m], smem.queries, warp * Config::kWarpRows + m * 16, k16);
      }
    });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) scale_columns<T>(scores[m], smem.keys[stage], 0);
    if (entry + kTileEntries > full_entries ||
        entry < window_of(warp_row + Config::kWarpRows - 1)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        // Row within the sequence; the lane's other row is 8 further.
        const int row = warp_row + m * 16 + lane / 4;
        uint64_t sees[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) sees[half] = entries_of_token(row + half * 8, entry);
        mask_scores(scores[m], sees);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax_step(rows[m], scores[m], args.scale_log2);
      scale_columns<T>(scores[m], smem.values[stage], 0);
    }
    multiply_values<T>(rows, scores, smem.values[stage], 0);
  }

  // The output of the warp replaces its query rows in shared memory. Stores then have 16 bytes.
  __device__ __forceinline__ void store_output(RowTile<kDim> (&rows)[kRowTiles]) const {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      rows[m].reduce_sum();
      if constexpr (Config::kSinks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows[m].sum[half] = with_sink(rows[m].sum[half], args.sinks, head, rows[m].row_max[half]);
        }
      }
      const float inverse[2] = {inverse_of(rows[m].sum[0]), inverse_of(rows[m].sum[1])};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp * Config::kWarpRows + m * 16 + half * 8 + lane / 4;
          T* pair = smem.queries.chunk(row, n) + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(pair) =
              pack2<T>(normalised(rows[m].acc[n][2 * half], inverse[half]),
                       normalised(rows[m].acc[n][2 * half + 1], inverse[half]));
        }
      }
    }
    __syncwarp();
    constexpr int kChunks = kDim / 8;
#pragma unroll
    for (int i = lane; i < Config::kWarpRows * kChunks; i += 32) {
      const int row = warp * Config::kWarpRows + i / kChunks;
      if (cta_row + row < smem.sequence.num_tokens) {
        const int64_t t = smem.sequence.token_begin + cta_row + row;
        T* to = args.out + (t * args.num_heads + head) * kDim + i % kChunks * 8;
        store(to, load<T, 8>(smem.queries.chunk(row, i % kChunks)));
      }
    }
  }
};

// ---- kernels

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    attention_prefill_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& smem = *reinterpret_cast<PrefillSmem<Config>*>(shared);

  ptx::pdl_wait();
  ptx::pdl_launch();
  const Sequence seq = load_sequence(args.tokens, blockIdx.z);
  const int cta_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kRows;
  if (cta_row >= seq.num_tokens || seq.first_entry + cta_row >= args.end_position) return;
  const PrefillCta<Config> cta{args, smem, seq, cta_row};

  RowTile<Config::kDim> rows[Config::kRowTiles];
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) rows[m].clear();
  if (threadIdx.x == 0) smem.sequence = seq;
  cta.fetch_queries();
  cta.fetch_entries(cta.first_tile, cta.page_of(cta.first_tile));
  ptx::cp_async_commit();
  int next_page = cta.page_of(cta.first_tile + 1);
  for (int tile = cta.first_tile; tile * Config::kTileEntries < cta.entry_end; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; all warps are done with the previous one
    if ((tile + 1) * Config::kTileEntries < cta.entry_end) {
      cta.fetch_entries(tile + 1, next_page);
      next_page = cta.page_of(tile + 2);
    }
    ptx::cp_async_commit();
    // A warp skips tiles of which none of its rows sees an entry.
    if (tile * Config::kTileEntries < cta.some_entries &&
        (tile + 1) * Config::kTileEntries > cta.window_of(cta.warp_row)) {
      cta.attend(rows, tile);
    }
  }
  cta.store_output(rows);
}

// ---- launchers

template <typename Config>
void launch_prefill(const Context& ctx, const AttentionParams& params) {
  auto kernel = attention_prefill_kernel<Config>;
  constexpr size_t kSharedBytes = sizeof(PrefillSmem<Config>);
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  allow_shared_bytes(kernel, kSharedBytes);
  const int num_row_tiles = (params.tokens.max_seq_tokens + Config::kRows - 1) / Config::kRows;
  const dim3 grid(params.num_heads, num_row_tiles, params.tokens.num_seqs);
  launch(ctx, kernel, grid, Config::kThreads, kSharedBytes,
         make_args<typename Config::Element>(params));
}

}  // namespace

void attention_prefill_wide(const Context& ctx, const AttentionParams& params);
#ifdef CPMCU_SM90
void attention_prefill_sm90(const Context& ctx, const AttentionParams& params);
#endif

// Graph-safe. Reads from the device: seq_slots, seq_token_begin, slot_lengths, ancestor_masks,
// page_table.
void attention_prefill(const Context& ctx, const AttentionParams& params) {
  if (params.tokens.num_tokens == 0) return;
  check_attention(params, "attention_prefill");
  CHECK(
      !params.by_position,
      "attention_prefill: by_position is set, expected false (only attention_decode supports it)");
  if (!params.selection.empty()) {
    AttentionParams dense = params;  // attention of the tokens below dense_len
    dense.selection.words = {};
    if (dense.selection.dense_len > 0) cuda::attention_prefill(ctx, dense);
    return sparse_prefill(ctx, params);
  }
  if (params.head_dim == 512) return attention_prefill_wide(ctx, params);
#ifdef CPMCU_SM90
  if (ctx.compute_capability == 90 && params.head_dim == 128 && params.window == 0 &&
      params.tokens.ancestor_masks == nullptr && params.sinks.empty()) {
    return attention_prefill_sm90(ctx, params);
  }
#endif
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    if (!params.sinks.empty()) {
      dispatch_int<64, 128>(
          "attention_prefill with sinks: head_dim", params.head_dim, [&](auto dim) {
            using T = decltype(element);
            params.k_scales.empty()
                ? launch_prefill<PrefillConfig<T, dim.value, false, true>>(ctx, params)
                : launch_prefill<PrefillConfig<T, dim.value, true, true>>(ctx, params);
          });
      return;
    }
    dispatch_int<64, 128, 256>("attention_prefill: head_dim", params.head_dim, [&](auto dim) {
      using T = decltype(element);
      params.k_scales.empty() ? launch_prefill<PrefillConfig<T, dim.value, false>>(ctx, params)
                              : launch_prefill<PrefillConfig<T, dim.value, true>>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
