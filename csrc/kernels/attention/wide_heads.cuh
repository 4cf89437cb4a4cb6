// Heads of 512: what attention_decode_wide.cu and attention_prefill_wide.cu share.
//
// The four warps of a CTA share the query rows. Each has 128 of the 512 dimensions, its slice, of
// queries, keys, values and outputs, and copies its own slices of keys and values. The scores of a
// slice are a part of the scores, so the warps exchange them once for each KV tile of 32 entries.
//
// Surprising: the parts replace the slice's keys in shared memory, which no warp reads again. A CTA
// then needs 64 KiB for keys and values, one stage of each. While the values of a tile are
// multiplied, the next keys arrive. While keys are multiplied, their values arrive.
#pragma once

#include "kernels/attention/fp8_tiles.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWideDim = 512;
// Each warp has a slice of the dimensions.
constexpr int kSliceDim = 128, kSlices = kWideDim / kSliceDim;
constexpr int kWideTile = 32;  // entries of a KV tile

template <typename T, bool kFp8>
using SliceTile = CacheTile<T, kFp8, kWideTile, kSliceDim>;

// Starts the copy of a warp's slice of a KV tile, as one cp.async group. Lane i names row i of the
// tile: `row` is its row in the cache [pages * Hkv * 64, 512]. If `row` is -1, row i becomes zero.
// Returns the scale of that row in an fp8 cache.
template <bool kFp8, typename T>
__device__ __forceinline__ float fetch_slice(SliceTile<T, kFp8>& tile, const AttentionArgs<T>& args,
                                             Operand operand, int warp, int row) {
  constexpr int kChunk = kFp8 ? 16 : 8;  // elements of 16 bytes
  constexpr int kChunks = kSliceDim / kChunk, kStep = 32 / kChunks;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = lane / kChunks, c = lane % kChunks;
  const auto* const cache =
      reinterpret_cast<const unsigned char*>(operand == kKeys ? args.k_cache : args.v_cache) +
      (warp * kSliceDim / kChunk + c) * 16;
#pragma unroll 4  // with more, the addresses of all copies take registers
  for (int i = 0; i < kWideTile; i += kStep) {
    const int from = __shfl_sync(0xffffffffu, row, first + i);
    const uint32_t to = tile.address(first + i % 8, c) + i / 8 * 8 * tile.kRowBytes;
    ptx::cp_async16(to, cache + int64_t{max(from, 0)} * (kWideDim / kChunk * 16), from >= 0);
  }
  ptx::cp_async_commit();
  if constexpr (!kFp8) return 0;
  return row < 0 ? 0 : (operand == kKeys ? args.k_scales : args.v_scales)[row];
}

// The row in the cache of an entry of a sequence, in the head `kv_head`.
template <typename T>
__device__ __forceinline__ int cache_row(const AttentionArgs<T>& args, int page, int kv_head,
                                         int entry) {
  return (page * args.num_kv_heads + kv_head) * kPageSize + entry % kPageSize;
}

// Replaces the scores of each warp's slice by the sum over all slices, in order. The keys of all
// slices must have been read; they are overwritten. slice_keys(u) are those of warp u. All threads
// of the CTA take part.
template <int kRowTiles, typename SliceKeys>
__device__ __forceinline__ void add_slices(float (&scores)[kRowTiles][kWideTile / 8][4], int warp,
                                           const SliceKeys& slice_keys) {
  using Parts = float4[kRowTiles][kWideTile / 8][32];
  using Tile = std::remove_reference_t<decltype(slice_keys(0))>;
  static_assert(sizeof(Parts) <= sizeof(Tile), "the scores must fit the keys");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // all lanes have read the keys
  auto& own = reinterpret_cast<Parts&>(slice_keys(warp));
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kWideTile / 8; ++n) {
      const float (&s)[4] = scores[m][n];
      own[m][n][lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kSlices; ++u) {
    const auto& parts = reinterpret_cast<const Parts&>(slice_keys(u));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kWideTile / 8; ++n) {
        const float4 part = parts[m][n][lane];
        const float of_slice[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[m][n][i] = u == 0 ? of_slice[i] : __fadd_rn(scores[m][n][i], of_slice[i]);
        }
      }
    }
  }
  __syncthreads();  // all warps have read the parts, and the next keys may arrive
}

}  // namespace
}  // namespace cpmcu::cuda
