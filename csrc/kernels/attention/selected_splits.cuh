// Splits of attention with a BlockSelection (attention.h): a split is two blocks, and a token has
// the splits in which it sees a block. A token's partial results are numbered by its own splits.
#pragma once

#include "kernels/attention/sparse.h"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

void sparse_decode(const Context& ctx, const AttentionParams& params);   // as attention_splits
void sparse_prefill(const Context& ctx, const AttentionParams& params);  // from dense_len on
// sparse_decode for sequences with one token each and at most 16 query heads of a KV head.
void sparse_one_token(const Context& ctx, const AttentionParams& params);
// sparse_prefill for heads of 128 on Hopper.
void sparse_prefill_sm90(const Context& ctx, const AttentionParams& params);

constexpr int kMaxWords = selection_words(kMaxSparseEntries);

// The first block of the words `any` from `block` on; `end` if there is none before it.
__device__ __forceinline__ int next_block(const uint64_t* any, int block, int end) {
  while (block < end) {
    const uint64_t rest = any[block / 64] >> block % 64;
    if (rest != 0) return min(block + __ffsll(static_cast<long long>(rest)) - 1, end);
    block = (block / 64 + 1) * 64;
  }
  return end;
}

// The splits with a block in a word of 64 blocks: bit 2 i is blocks 2 i and 2 i + 1.
__device__ __forceinline__ uint64_t splits_of(uint64_t blocks) {
  return (blocks | blocks >> 1) & 0x5555555555555555;
}
// Number of splits with a block below `block`, which begins a split.
__device__ __forceinline__ int splits_before(const uint64_t* words, int block) {
  int count = 0;
#pragma unroll 8
  for (int w = 0; w < block / 64; ++w) count += __popcll(splits_of(words[w]));
  return block % 64 == 0 ? count
                         : count + __popcll(splits_of(words[block / 64]) << (64 - block % 64));
}
// Number of splits of all words. All threads of a warp call it with the same words.
__device__ __forceinline__ int count_splits(const uint64_t* words, int num_words) {
  int count = 0;
  for (int w = static_cast<int>(threadIdx.x) % 32; w < num_words; w += 32) {
    count += __popcll(splits_of(words[w]));
  }
  return __reduce_add_sync(0xffffffffu, count);
}
// The first block of split `index`; the end of the words if there are fewer splits. All threads of
// a warp call it with the same arguments.
__device__ __forceinline__ int find_split(const uint64_t* words, int num_words, int index) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < num_words; first += 32) {
    uint64_t splits = first + lane < num_words ? splits_of(words[first + lane]) : 0;
    const int count = __popcll(splits);
    int until = count;  // splits of this lane and of lower lanes
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(0xffffffffu, until, offset);
      if (lane >= offset) until += lower;
    }
    const uint32_t beyond = __ballot_sync(0xffffffffu, until > index);
    if (beyond != 0) {
      const int owner = __ffs(static_cast<int>(beyond)) - 1;
      for (int skip = index - (until - count); skip > 0 && lane == owner; --skip) {
        splits &= splits - 1;
      }
      const int block = (first + lane) * 64 + __ffsll(static_cast<long long>(splits)) - 1;
      return __shfl_sync(0xffffffffu, block, owner);
    }
    index -= __shfl_sync(0xffffffffu, until, 31);
  }
  return num_words * 64;
}
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
      : count(count_splits(selection_of(args, row, head / (args.num_heads / args.num_kv_heads)),
                           args.selection_words)) {}
  __device__ __forceinline__ int partial(int split) const { return split; }
  __device__ __forceinline__ bool has(int split) const { return split < count; }
};

}  // namespace cpmcu::cuda
