// attention_prefill for heads of 512.
//
// Roofline: 4 * tokens * entries * D operations for each query head, on tensor cores. With 32 query
// rows a CTA, shared memory limits: 48 fragments of 512 bytes for 128 mma of a warp and KV tile.
//
// Schedule: a CTA has 32 query rows of one head. Its four warps have 128 dimensions each
// (wide_heads.cuh). KV tiles of 32 entries are visited in ascending order, as in
// attention_prefill.cu, and begin at multiples of 32 from entry 0.
//
// Surprising: a thread holds the accumulators of 32 rows of its slice, 128 registers, so the
// queries stay in shared memory: 96 KiB in all, of the 99 KiB that sm_86 and sm_89 have. ptxas 13.0
// spills about 250 bytes of a thread with a 16-bit cache, and nothing with an fp8 one.
#include "core/dispatch.h"
#include "kernels/attention/wide_heads.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kRowTiles = 2;           // m16 tiles of a CTA
constexpr int kRows = kRowTiles * 16;  // query rows of a CTA
constexpr int kThreads = kSlices * 32;

template <typename T, bool kFp8>
struct WidePrefillSmem {
  struct Slice {                                // each warp fills only its own slice
    SwizzledTile<T, kRows, kSliceDim> queries;  // the output replaces them at the end
    SliceTile<T, kFp8> keys, values;
  };
  Slice slices[kSlices];
};

// The visibility of 64 entries from `entry` on to a token of the sequence.
template <typename T>
__device__ __forceinline__ uint64_t entries_of_token(const AttentionArgs<T>& args,
                                                     const Sequence& seq, int row, int entry) {
  const uint64_t* const masks = args.tokens.ancestor_masks;
  const uint64_t sees = masks == nullptr
                            ? first_entries(seq.length + row + 1 - entry)
                            : seen_entries(row < seq.num_tokens ? masks[seq.token_begin + row] : 0,
                                           seq.length, entry);
  return sees & ~first_entries(window_begin(seq.first_entry + row, args.window) - entry);
}

// The output of a warp's slice replaces its queries in shared memory. Stores then have 16 bytes.
template <typename T, typename Slice>
__device__ __forceinline__ void store_slice(RowTile<kSliceDim> (&rows)[kRowTiles], Slice& slice,
                                            T* out, int64_t row_stride, int num_rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    rows[m].reduce_sum();
    const float inverse[2] = {inverse_of(rows[m].sum[0]), inverse_of(rows[m].sum[1])};
#pragma unroll
    for (int n = 0; n < kSliceDim / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* const pair = slice.queries.chunk(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(pair) =
            pack2<T>(normalised(rows[m].acc[n][2 * half], inverse[half]),
                     normalised(rows[m].acc[n][2 * half + 1], inverse[half]));
      }
    }
  }
  __syncwarp();
  constexpr int kChunks = kSliceDim / 8;
  for (int i = lane; i < num_rows * kChunks; i += 32) {
    store(out + i / kChunks * row_stride + i % kChunks * 8,
          load<T, 8>(slice.queries.chunk(i / kChunks, i % kChunks)));
  }
}

// ---- kernels

// Grid: (query heads, row tiles, B).
template <typename T, bool kFp8>
__global__ void __launch_bounds__(kThreads, 2)
    attention_prefill_wide_kernel(const __grid_constant__ AttentionArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<WidePrefillSmem<T, kFp8>*>(shared);
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Sequence seq = load_sequence(args.tokens, blockIdx.z);
  const int cta_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kRows;
  if (cta_row >= seq.num_tokens || seq.first_entry + cta_row >= args.end_position) return;
  const int warp = ptx::uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.x);
  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const int num_rows = min(kRows, seq.num_tokens - cta_row);
  const bool has_masks = args.tokens.ancestor_masks != nullptr;
  // Entries that some row may see, and entries that all rows see.
  const int entry_end = has_masks ? seq.end() : seq.length + cta_row + num_rows;
  const int full_entries = has_masks ? seq.length : seq.length + cta_row + 1;
  const int all_windows = window_begin(seq.first_entry + cta_row + kRows - 1, args.window);
  auto& slice = smem.slices[warp];
  const auto row_of_lane = [&](int tile) {
    const int entry = tile * kWideTile + lane;
    if (entry >= entry_end) return -1;
    const int page =
        args.tokens.page_table[int64_t{seq.slot} * args.tokens.max_pages + entry / kPageSize];
    return cache_row(args, page, kv_head, entry);
  };

  const T* const q = args.qkv + int64_t{seq.token_begin + cta_row} * args.qkv_row +
                     head * args.q_head + warp * kSliceDim;
  fetch_tile<32>(slice.queries, q, args.qkv_row, num_rows, lane);
  int tile = window_begin(seq.first_entry + cta_row, args.window) / kWideTile;
  int row = row_of_lane(tile);
  float key_scale = fetch_slice<kFp8>(slice.keys, args, kKeys, warp, row);
  float value_scale = fetch_slice<kFp8>(slice.values, args, kValues, warp, row);

  RowTile<kSliceDim> rows[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) rows[m].clear();
#pragma unroll 1
  for (; tile * kWideTile < entry_end; ++tile) {
    const int entry = tile * kWideTile;
    const bool has_next = entry + kWideTile < entry_end;
    ptx::cp_async_wait<1>();
    __syncwarp();
    float scores[kRowTiles][kWideTile / 8][4];
    multiply_keys<T>(scores, slice.keys, 0, [&](uint32_t (&q)[kRowTiles][4], int k16) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) load_fragment_a(q[m], slice.queries, m * 16, k16);
    });
    add_slices(scores, warp, [&](int u) -> auto& { return smem.slices[u].keys; });
    const float scale_of_keys = key_scale;
    if (has_next) {
      row = row_of_lane(tile + 1);
      key_scale = fetch_slice<kFp8>(slice.keys, args, kKeys, warp, row);
    } else {
      ptx::cp_async_commit();
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kFp8) scale_columns_by_lane<T>(scores[m], scale_of_keys);
      if (entry + kWideTile > full_entries || entry < all_windows) {
        const int own = cta_row + m * 16 + lane / 4;
        const uint64_t sees[2] = {entries_of_token(args, seq, own, entry),
                                  entries_of_token(args, seq, own + 8, entry)};
        mask_scores(scores[m], sees);
      }
      softmax_step(rows[m], scores[m], args.scale_log2);
      if constexpr (kFp8) scale_columns_by_lane<T>(scores[m], value_scale);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    multiply_values<T>(rows, scores, slice.values, 0);
    __syncwarp();
    if (has_next) {
      value_scale = fetch_slice<kFp8>(slice.values, args, kValues, warp, row);
    } else {
      ptx::cp_async_commit();
    }
  }
  const int64_t row_stride = int64_t{args.num_heads} * kWideDim;
  store_slice(
      rows, slice,
      args.out + (seq.token_begin + cta_row) * row_stride + head * kWideDim + warp * kSliceDim,
      row_stride, num_rows);
}

}  // namespace

// ---- launchers

// Graph-safe. Reads from the device what attention_prefill reads.
void attention_prefill_wide(const Context& ctx, const AttentionParams& params) {
  const int num_row_tiles = (params.tokens.max_seq_tokens + kRows - 1) / kRows;
  const dim3 grid(params.num_heads, num_row_tiles, params.tokens.num_seqs);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto fp8) {
      constexpr bool kFp8 = decltype(fp8)::value;
      constexpr size_t kSharedBytes = sizeof(WidePrefillSmem<T, kFp8>);
      static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
      const auto kernel = attention_prefill_wide_kernel<T, kFp8>;
      allow_shared_bytes(kernel, kSharedBytes);
      launch(ctx, kernel, grid, kThreads, kSharedBytes, make_args<T>(params));
    };
    params.k_scales.empty() ? run(std::false_type{}) : run(std::true_type{});
  });
}

}  // namespace cpmcu::cuda
