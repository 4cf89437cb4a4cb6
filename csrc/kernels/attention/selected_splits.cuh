// Splits of attention with a BlockSelection (attention.h): a split is two blocks, and a token has
// the splits in which it sees a block. A token's partial results are numbered by its own splits.
#pragma once

#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

void sparse_decode(const Context& ctx, const AttentionParams& params);   // as attention_splits
void sparse_prefill(const Context& ctx, const AttentionParams& params);  // from dense_len on

// The splits with a block in a word of 64 blocks: bit 2 i is blocks 2 i and 2 i + 1.
__device__ __forceinline__ uint64_t splits_of(uint64_t blocks) {
  return (blocks | blocks >> 1) & 0x5555555555555555;
}
// Number of splits with a block below `block`, which begins a split.
__device__ __forceinline__ int splits_before(const uint64_t* words, int block) {
  int count = 0;
  for (int w = 0; w < block / 64; ++w) count += __popcll(splits_of(words[w]));
  return block % 64 == 0 ? count
                         : count + __popcll(splits_of(words[block / 64]) << (64 - block % 64));
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
      : count(splits_before(selection_of(args, row, head / (args.num_heads / args.num_kv_heads)),
                            args.selection_words * 64)) {}
  __device__ __forceinline__ int partial(int split) const { return split; }
  __device__ __forceinline__ bool has(int split) const { return split < count; }
};

}  // namespace cpmcu::cuda
