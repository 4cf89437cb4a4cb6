// Splits of attention with a BlockSelection (attention.h). A token's blocks are numbered in
// ascending order; its split i has its blocks 2 i and 2 i + 1. A token that sees all blocks has the
// splits of dense attention.
#pragma once

#include <type_traits>

#include "core/dispatch.h"
#include "kernels/attention/sparse.h"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

// Does the work of attention_splits.
void sparse_decode(const Context& ctx, const AttentionParams& params);
// For tokens from position dense_len on.
void sparse_prefill(const Context& ctx, const AttentionParams& params);
// sparse_decode for sequences with one token each and at most 16 query heads of a KV head.
void sparse_one_token(const Context& ctx, const AttentionParams& params);
// sparse_prefill for heads of 128 on Hopper.
void sparse_prefill_sm90(const Context& ctx, const AttentionParams& params);

constexpr int kMaxWords = selection_words(kMaxSparseEntries);
constexpr int kSplitBlocks = 2;  // blocks in one split of a token
static_assert(kSplitBlocks * kPageSize == split_begin(1), "the splits of dense attention");

void check_selected(const AttentionParams& params);

// Calls launch(element, dim, is_fp8) for the dtype of the queries, the head size and the cache.
template <typename Launch>
void dispatch_selected(const AttentionParams& params, Launch launch) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("attention with a selection: head_dim", params.head_dim, [&](auto dim) {
      params.k_scales.empty() ? launch(element, dim, std::false_type())
                              : launch(element, dim, std::true_type());
    });
  });
}

// The first block of [block, end) whose bit is set in `any`; `end` if there is none.
__device__ __forceinline__ int next_block(const uint64_t* any, int block, int end) {
  while (block < end) {
    const uint64_t rest = any[block / 64] >> block % 64;
    if (rest != 0) return min(block + __ffsll(static_cast<long long>(rest)) - 1, end);
    block = (block / 64 + 1) * 64;
  }
  return end;
}

// The place of bit `n` of the set bits of a word; 64 if there are no more than n.
__device__ __forceinline__ int place_of_bit(uint64_t word, int n) {
  if (n >= __popcll(word)) return 64;
  int place = 0;
#pragma unroll
  for (int width = 32; width > 0; width /= 2) {
    const int low = __popcll(word & ((uint64_t{1} << width) - 1));
    const bool above = n >= low;
    if (above) n -= low, word >>= width, place += width;
  }
  return place;
}
// Bits first .. end - 1 of the set bits of a word. `first` may be negative.
__device__ __forceinline__ uint64_t bits_between(uint64_t word, int first, int end) {
  const int from = first <= 0 ? 0 : place_of_bit(word, first);
  const int to = end <= 0 ? 0 : place_of_bit(word, end);
  return word & first_entries(to) & ~first_entries(from);
}

// The words of a token, two in each lane of a warp.
struct LaneWords {
  static_assert(kMaxWords <= 64, "a lane has two words");
  uint64_t words[2];
  int before;  // number of blocks in the words of lower lanes
  int count;   // number of blocks that the token sees

  __device__ __forceinline__ LaneWords(const uint64_t* from, int num_words) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = 2 * lane + i < num_words ? from[2 * lane + i] : 0;
    const int mine = __popcll(words[0]) + __popcll(words[1]);
    int until = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(0xffffffffu, until, offset);
      if (lane >= offset) until += lower;
    }
    before = until - mine;
    count = __shfl_sync(0xffffffffu, until, 31);
  }
  __device__ __forceinline__ int num_splits() const {
    return (count + kSplitBlocks - 1) / kSplitBlocks;
  }
  // Removes all blocks but the token's blocks first .. end - 1.
  __device__ __forceinline__ void keep(int first, int end) {
    const int low = __popcll(words[0]);
    words[0] = bits_between(words[0], first - before, end - before);
    words[1] = bits_between(words[1], first - before - low, end - before - low);
  }
  // The token's block `index`; -1 if there are fewer. All threads of a warp call it.
  __device__ __forceinline__ int block(int index) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, low = __popcll(words[0]);
    const int at = index - before;
    const bool is_here = at >= 0 && at < low + __popcll(words[1]);
    const int place = at < low ? place_of_bit(words[0], at) : 64 + place_of_bit(words[1], at - low);
    const uint32_t owners = __ballot_sync(0xffffffffu, is_here);
    const int owner = max(__ffs(static_cast<int>(owners)) - 1, 0);
    const int found = __shfl_sync(0xffffffffu, lane * 128 + place, owner);
    return owners != 0 ? found : -1;
  }
};

__device__ __forceinline__ bool has_block(const uint64_t* words, int block) {
  return (words[block / 64] >> block % 64 & 1) != 0;
}
// The words of a token and KV head.
template <typename T>
__device__ __forceinline__ const uint64_t* selection_of(const AttentionArgs<T>& args, int row,
                                                        int kv_head) {
  const int64_t index = static_cast<int64_t>(row) * args.num_kv_heads + kv_head;
  return args.selection + index * args.selection_words;
}

// The splits of a token and query head, for attention_combine. Like RowSplits.
struct SelectedSplits {
  static constexpr bool kIsOld = false;
  static constexpr bool kSkipsOne = false;
  static constexpr int begin = 0;
  int count;

  template <typename T>
  __device__ __forceinline__ SelectedSplits(const AttentionArgs<T>& args, int row, int head)
      : count(LaneWords(selection_of(args, row, head / (args.num_heads / args.num_kv_heads)),
                        args.selection_words)
                  .num_splits()) {}
  __device__ __forceinline__ int partial(int split) const { return split; }
  __device__ __forceinline__ bool has(int split) const { return split < count; }
};

}  // namespace cpmcu::cuda
