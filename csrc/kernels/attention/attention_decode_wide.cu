// attention_decode for heads of 512.
//
// Roofline: K and V are read once from HBM, 2 KiB for each entry and KV head (half of it in fp8).
//
// Schedule: a CTA has 16 packed rows and a range of splits, as in decode.cuh. For each KV tile:
//   1. Each warp multiplies its slice of queries and keys; the warps add their scores.
//   2. Every warp computes the same probabilities, and multiplies its slice of the values.
// 66 KiB of shared memory and up to 255 registers: two CTAs fit an SM, or one of sm_86 and sm_89.
//
// Surprising: in a verified tree, the CTA fetches a tile for each token, which holds the token's
// ancestors in the order of depth. Rows of the cache are copied one by one anyway, and a CTA has
// few tokens: two if eight query heads share a KV head. Plain decoding of the token has the same
// tile, so the bits are the same.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"
#include "kernels/attention/wide_heads.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, bool kFp8_>
struct WideDecodeConfig {
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kRows = kWarpRows;
  static constexpr int kThreads = kSlices * 32;
  static constexpr int kCtasPerSm = 2;
};

template <typename Config>
struct WideDecodeSmem {
  using Tile = SliceTile<typename Config::Element, Config::kFp8>;
  Tile keys[kSlices], values[kSlices];  // each warp fills only its own slice
  PackedRows<Config::kRows> packed;
  uint8_t paths[Config::kRows][kMaxTreeSize];  // by_position: ancestors of the row's token in order
};

// A KV tile from `entry` on, for all rows, or for the tree token of packed row `row` only.
struct WideItem {
  int entry;
  int row;  // the only packed row that reads it; -1: all rows read it
};

// The CTA's KV tiles in order.
template <typename Config, bool kByPosition>
struct WideItems {
  const PackedRows<Config::kRows>& packed;
  const Chunk& chunk;
  int entry_end;  // end of the entries of the CTA's range

  // The first tile at or after `entry`. Its entry is entry_end or more if there is none.
  __device__ __forceinline__ WideItem at(int entry) const {
    if (!kByPosition || entry + kKvTile <= chunk.seq.length) return {entry, -1};
    return of_token(entry, 0);
  }
  __device__ __forceinline__ WideItem after(const WideItem& item) const {
    if (item.row < 0) return at(item.entry + kKvTile);
    const WideItem next =
        of_token(item.entry, (packed.tokens[item.row] + 1) * chunk.group - chunk.first);
    return next.entry < entry_end ? next : at(item.entry + kKvTile);
  }
  __device__ __forceinline__ bool has(const WideItem& item) const { return item.entry < entry_end; }

 private:
  // The tile of the first token from packed row `row` on that has entries there.
  __device__ __forceinline__ WideItem of_token(int entry, int row) const {
    const int end = min(Config::kRows, chunk.num_packed - chunk.first);
    while (entry < entry_end && row < end) {
      if (entry < packed.ends[row]) return {entry, row};
      row = (packed.tokens[row] + 1) * chunk.group - chunk.first;
    }
    return {entry_end, -1};
  }
};

// The row in the cache of this lane's entry of a tile; -1: there is none.
template <typename Config>
__device__ __forceinline__ int row_of_lane(const WideDecodeSmem<Config>& smem,
                                           const AttentionArgs<typename Config::Element>& args,
                                           const Chunk& chunk, const WideItem& item) {
  const Sequence& seq = chunk.seq;
  const int position = item.entry + static_cast<int>(threadIdx.x) % 32;
  int entry = position;
  if (item.row >= 0) {
    if (position >= smem.packed.ends[item.row]) return -1;
    if (position >= seq.length) entry = seq.length + smem.paths[item.row][position - seq.length];
  } else if (position >= seq.end()) {
    return -1;
  }
  return cache_row(args, page_of(args.tokens, seq.slot, entry), chunk.kv_head, entry);
}

// Masks the tile of one tree token: sets scores to -inf for rows of other tokens, and for entries
// that the token does not see.
template <typename Config>
__device__ __forceinline__ void hide_tree_tile(float (&scores)[kKvTileN8][4],
                                               const PackedRows<Config::kRows>& packed, int window,
                                               const WideItem& item) {
  uint32_t sees[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    const int num_entries = packed.ends[own] - item.entry;
    const bool any = num_entries > 0 && packed.tokens[own] == packed.tokens[item.row];
    sees[half] = any ? ~0u >> max(kKvTile - num_entries, 0) : 0;
    if (window > 0) {
      sees[half] &= ~static_cast<uint32_t>(first_entries(packed.window_begins[own] - item.entry));
    }
  }
  mask_scores(scores, sees);
}

// A warp's slice of the queries as operands A. Rows that do not exist are zero.
template <typename Config>
__device__ __forceinline__ void load_queries(uint32_t (&queries)[kSliceDim / 16][4],
                                             const PackedRows<Config::kRows>& packed,
                                             const typename Config::Element* qkv, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = packed.queries[half * 8 + lane / 4];
    const auto* const row = qkv + max(from, 0) + warp * kSliceDim + lane % 4 * 2;
#pragma unroll
    for (int k16 = 0; k16 < kSliceDim / 16; ++k16) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto* const pair = reinterpret_cast<const uint32_t*>(row + k16 * 16 + i * 8);
        queries[k16][half + 2 * i] = from < 0 ? 0 : *pair;
      }
    }
  }
}

// ---- kernels

// Grid: (chunks of packed rows * KV heads, split ranges, B).
template <typename Config, bool kByPosition>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_wide_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                          int num_chunks, int max_splits) {
  using T = typename Config::Element;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<WideDecodeSmem<Config>*>(shared);
  const int warp = ptx::uniform_warp();
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const SplitRange range = split_range_of_cta(args, seq, max_splits, false, [](int) {});
  if (range.entry_begin >= range.entry_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }
  smem.packed.template load<kByPosition, kWideDim>(args, chunk);
  __syncthreads();
  if constexpr (kByPosition) {
    for (int i = threadIdx.x; i < Config::kRows * kMaxTreeSize; i += Config::kThreads) {
      const int row = i / kMaxTreeSize, node = i % kMaxTreeSize;
      const uint64_t mask = smem.packed.masks[row], bit = uint64_t{1} << node;
      if (mask & bit) smem.paths[row][__popcll(mask & (bit - 1))] = node;
    }
    __syncthreads();
  }
  ptx::pdl_wait();
  ptx::pdl_launch();

  const WideItems<Config, kByPosition> items{smem.packed, chunk, range.entry_end};
  WideItem item = items.at(range.entry_begin);
  if (!items.has(item)) return;
  int row = row_of_lane(smem, args, chunk, item);
  float key_scale = fetch_slice<Config::kFp8>(smem.keys[warp], args, kKeys, warp, row);
  float value_scale = fetch_slice<Config::kFp8>(smem.values[warp], args, kValues, warp, row);
  uint32_t queries[kSliceDim / 16][4];
  load_queries<Config>(queries, smem.packed, args.qkv, warp);

  RowTile<kSliceDim> state;  // state of the softmax over the split
  state.clear();
  int split = range.split, split_end = split_begin(split + 1);
#pragma unroll 1
  while (true) {
    const WideItem next = items.after(item);
    const bool has_next = items.has(next);
    ptx::cp_async_wait<1>();
    __syncwarp();
    float scores[1][kKvTileN8][4];
    multiply_keys<T>(scores, smem.keys[warp], 0, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
    });
    add_slices(scores, warp, [&](int u) -> auto& { return smem.keys[u]; });
    if constexpr (Config::kFp8) scale_columns_by_lane<T>(scores[0], key_scale);
    if (has_next) {
      row = row_of_lane(smem, args, chunk, next);
      key_scale = fetch_slice<Config::kFp8>(smem.keys[warp], args, kKeys, warp, row);
    } else {
      ptx::cp_async_commit();
    }
    if (kByPosition && item.row >= 0) {
      hide_tree_tile<Config>(scores[0], smem.packed, args.window, item);
    } else {
      float (&tile)[1][1][kKvTileN8][4] = reinterpret_cast<float (&)[1][1][kKvTileN8][4]>(scores);
      smem.packed.hide(tile, args, seq, 0, item.entry);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    add_kv_tile<T>(state, scores[0], args.scale_log2, 0, values_from(smem.values[warp], 0),
                   [&](float (&p)[kKvTileN8][4]) {
                     if constexpr (Config::kFp8) scale_columns_by_lane<T>(p, value_scale);
                   });
    __syncwarp();
    if (has_next) {
      value_scale = fetch_slice<Config::kFp8>(smem.values[warp], args, kValues, warp, row);
    } else {
      ptx::cp_async_commit();
    }
    if (!has_next || next.entry >= split_end) {
      write_split<kWideDim, false>(args, smem.packed, state, 0, warp * kSliceDim, split,
                                   max_splits);
      split_end = split_begin(++split + 1);
      state.clear();
    }
    if (!has_next) break;
    item = next;
  }
}

}  // namespace

// ---- launchers

// Graph-safe. Reads from the device what attention_splits reads.
void attention_splits_wide(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    const auto launch = [&](auto fp8) {
      using Config = WideDecodeConfig<decltype(element), decltype(fp8)::value>;
      using Smem = WideDecodeSmem<Config>;
      params.by_position
          ? launch_splits<Config, Smem>(ctx, params, attention_wide_kernel<Config, true>)
          : launch_splits<Config, Smem>(ctx, params, attention_wide_kernel<Config, false>);
    };
    params.k_scales.empty() ? launch(std::false_type{}) : launch(std::true_type{});
  });
}

}  // namespace cpmcu::cuda
