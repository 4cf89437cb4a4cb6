// rotary_kv (kernels/layer/rotary_kv.h) within attention of one token a sequence. Each CTA applies
// it to the query heads that it reads. The CTA whose split range has the entry of the new token
// also applies it to the key head and writes key and value to the cache. The bits are those of
// rotary_kv.
//
// The copies of KV tiles leave out the new entry. Its key and value come from shared memory, so no
// CTA reads what another one writes. Therefore all tiles are loaded before the previous kernel
// ends.
#pragma once

#include "kernels/attention/decode.cuh"
#include "kernels/layer/rotary_heads.cuh"

namespace cpmcu::cuda {
namespace {

// The new token in shared memory.
template <typename T, int kDim>
struct NewToken {
  Rotation rotations[kDim / 2];
  alignas(16) T key[kDim];
  alignas(16) T value[kDim];

  // Reads only data that were complete before the pass.
  template <int kThreads>
  __device__ __forceinline__ void rotate_by(const RotaryKvArgs<T>& rotary, int row) {
    const float position = static_cast<float>(rotary.tokens.positions[row]);
    for (int i = static_cast<int>(threadIdx.x); i < rotary.rotary_dim / 2; i += kThreads) {
      rotations[i] = rotation_by(position * rotary.inv_freq[i], rotary.attention_scaling);
    }
    // The weights of the norms arrive in L2 while the previous kernel runs.
    constexpr int kLines = kDim * static_cast<int>(sizeof(T)) / 128;
    const int line = static_cast<int>(threadIdx.x) % kLines;
    const T* norm = static_cast<int>(threadIdx.x) < kLines ? rotary.q_norm : rotary.k_norm;
    if (threadIdx.x < 2 * kLines && norm != nullptr) ptx::prefetch_l2(norm + line * 64);
  }

  // Applies rotary_kv to the query heads of the CTA, and to the key and the value if the CTA owns
  // their entry. `cache_offset`: of that entry.
  template <int kThreads, int kRows>
  __device__ __forceinline__ void apply(const RotaryKvArgs<T>& rotary, const Chunk& chunk,
                                        SwizzledTile<T, kRows, kDim>& queries, bool owns_entry,
                                        int64_t cache_offset) {
    constexpr int kLanes = kDim / 16, kGroups = kThreads / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const uint32_t group_mask = (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 - lane);
    const PartPlace at(lane, rotary.rotary_dim);
    Rotation by[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) by[i] = rotations[at.rotates ? at.low + i : i];
    const T* qkv_row = rotary.qkv + int64_t{chunk.seq.token_begin} * rotary.layout.row;
    // A group of lanes has a query head, the key or the value. Rows without a query become zero.
    const int num_heads = chunk.group + 2, first = static_cast<int>(threadIdx.x) / kLanes;
    const auto exists = [&](int i) { return i < chunk.group || (owns_entry && i < num_heads); };
    const auto head_of = [&](int i) {
      const int kv_head = chunk.kv_head + rotary.num_heads;
      return i < chunk.group    ? chunk.kv_head * chunk.group + i
             : i == chunk.group ? kv_head
                                : kv_head + rotary.num_kv_heads;
    };
    // All heads of the group are loaded at once.
    constexpr int kHeads = (kRows + 2 + kGroups - 1) / kGroups;
    Vec16<T> low[kHeads] = {}, high[kHeads] = {};
#pragma unroll
    for (int n = 0; n < kHeads; ++n) {
      const int i = first + n * kGroups;
      if (!exists(i)) continue;
      const T* head = qkv_row + column_of_head<kDim>(rotary, head_of(i));
      low[n] = load<T, 8>(head + at.low), high[n] = load<T, 8>(head + at.high);
    }
#pragma unroll 1
    for (int i = first; i < max(num_heads, kRows); i += kGroups) {
      HeadPart x{};
      if (exists(i)) {
        x = rotated_head<kDim>(rotary, widened<T>(low[0], high[0]), head_of(i), at, by, group_mask);
        if (i >= chunk.group) {
          const bool is_key = i == chunk.group;
          store_part(is_key ? key : value, at, x);
          store_part((is_key ? rotary.k_cache : rotary.v_cache) + cache_offset, at, x);
          x = {};
        }
      }
#pragma unroll
      for (int n = 0; n + 1 < kHeads; ++n) low[n] = low[n + 1], high[n] = high[n + 1];
      if (i < kRows) store_part_to(queries, i, at, x);
    }
  }

 private:
  template <int kRows>
  static __device__ __forceinline__ void store_part_to(SwizzledTile<T, kRows, kDim>& tile, int row,
                                                       const PartPlace& at, const HeadPart& x) {
    T* low = tile.chunk(row, at.low / 8);
    store_part(low, {0, static_cast<int>(tile.chunk(row, at.high / 8) - low), at.rotates}, x);
  }
};
// Puts the new key or value into its row of a KV tile.
template <typename T, int kRows, int kDim>
__device__ __forceinline__ void put_row(SwizzledTile<T, kRows, kDim>& tile, int row,
                                        const T (&from)[kDim], int lane) {
  if (lane < kDim / 8) store(tile.chunk(row, lane), load<T, 8>(from + lane * 8));
  __syncwarp();
}

}  // namespace
}  // namespace cpmcu::cuda
