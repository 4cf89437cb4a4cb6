// How partial results of splits become rows of `out`: what attention_combine shares with a chain of
// products that reads `out`. The order of additions is laid down in decode.cuh.
#pragma once

#include <climits>

#include "core/reduce.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

// Up to so many splits are combined by a chain of products however few the rows: those of one row
// in each of its blocks anew.
constexpr int kMaxCombinedSplits = 64;

// attention_combine, when a chain of products is next: in fewer and larger blocks, beside which
// that finds room on more multiprocessors.
void attention_combine_before_fused_layer(const Context& ctx, const AttentionParams& params);

// Where the partial results lie in scratch.
struct Partials {
  float* acc;      // [splits, T * Hq, D], by dimension_at()
  float2* states;  // [splits, T * Hq]: row_max and sum
  int64_t num_rows;

  __device__ Partials(float* scratch, int num_splits, int num_rows_, int head_dim)
      : acc(scratch),
        states(reinterpret_cast<float2*>(scratch + num_splits * (int64_t{num_rows_} * head_dim))),
        num_rows(num_rows_) {}
};

// Which dimension of its row stands in a place of acc: those of an mma tile that a thread has lie
// together, so that it writes 16 bytes at a time.
__device__ constexpr int dimension_at(int place) {
  return place / 16 * 16 + place / 2 % 2 * 8 + place / 4 % 4 * 2 + place % 2;
}

// So many splits in order, from a multiple on, are a group, and are summed first. Then the runs of
// so many splits are, in order, and then these sums.
constexpr int kLog2SplitsPerGroup = 2, kSplitsPerGroup = 1 << kLog2SplitsPerGroup;
constexpr int kSplitsTogether = 8, kGroupsTogether = kSplitsTogether / kSplitsPerGroup;

// The number of splits of a sequence from which on attention of a tree sums runs itself and
// leaves them where the run's first split has its place; kNeverMerge: it does not.
constexpr int kNeverMerge = INT_MAX;
int merges_from(const Context& ctx, const AttentionParams& params);

// make_args for attention_decode and whoever combines what it left.
template <typename T>
AttentionArgs<T> make_decode_args(const Context& ctx, const AttentionParams& params) {
  AttentionArgs<T> args = make_args<T>(params);
  args.merge_from = merges_from(ctx, params);
  return args;
}

// The splits of a row: [begin, count). Those before are outside of its window and may be missing.
// Where attention has summed runs, only the first split of each has a partial result: that of split
// i << shift for all i.
struct RowSplits {
  int begin, count, shift;

  template <typename T>
  __device__ __forceinline__ RowSplits(const AttentionArgs<T>& args, int row) {
    const StepTokens& tokens = args.tokens;
    int own, end, last;
    if (tokens.num_tokens == 1 || (args.by_position && tokens.num_seqs == 1)) {
      own = tokens.positions[row];  // two loads at once instead of three, one by one
      end = own + 1;
      last = tokens.positions[0] + tokens.num_tokens;
    } else {
      const Sequence seq = load_sequence(tokens, tokens.token_seqs[row]);
      own = args.by_position ? tokens.positions[row] : seq.first_entry + row - seq.token_begin;
      last = seq.end();
      end = args.by_position ? own + 1 : last;
    }
    shift = num_splits(last) >= args.merge_from ? kLog2SplitsPerGroup : 0;
    begin = (num_splits(window_begin(own, args.window) + 1) - 1) >> shift << shift;
    count = num_splits(end);
  }
  // Which split's partial result this one is in.
  __device__ __forceinline__ int partial(int split) const { return split >> shift << shift; }
  __device__ __forceinline__ bool has(int split) const { return split >= begin && split < count; }
};

// The sum of probabilities of a row of a head: of a group, then of every eighth group, then of
// these by pairs. add_split_groups: a lane adds `part`, of one of 32 splits or, where attention has
// summed them, runs.
__device__ __forceinline__ float add_split_groups(float sum, float part, bool are_merged) {
  const int lane = threadIdx.x % 32;
  const auto of_lane = [&](int i) { return __shfl_sync(0xffffffffu, part, i); };
  constexpr int kGroupsOfLanes = 32 / kSplitsPerGroup;
  float group = are_merged ? sum : 0;
#pragma unroll
  for (int i = 0; i < kSplitsPerGroup; ++i) {
    group = __fadd_rn(group, of_lane(are_merged ? lane % kGroupsOfLanes + i * kGroupsOfLanes
                                                : lane - lane % kSplitsPerGroup + i));
  }
  return are_merged ? group : __fadd_rn(sum, group);
}
__device__ __forceinline__ float sum_of_split_groups(float sum, bool are_merged) {
  const int apart = are_merged ? 1 : kSplitsPerGroup;  // lanes with neighbouring runs
#pragma unroll
  for (int i = 1; i < 32 / kSplitsPerGroup; i *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, i * apart));
  }
  return sum;
}

}  // namespace cpmcu::cuda
