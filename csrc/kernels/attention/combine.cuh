// Combination of the partial results of splits: the parts that attention_combine shares with the
// fused layer kernel, which reads `out`. decode.cuh defines the order of the additions.
#pragma once

#include <climits>

#include "core/reduce.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

// Up to this number of splits, the fused layer kernel combines them itself, whatever the number of
// tokens. For one token, each of its CTAs repeats the combination.
constexpr int kMaxCombinedSplits = 64;

// attention_combine for the case that the fused layer kernel is next. It uses fewer and larger
// CTAs, so the next kernel finds room on more SMs.
void attention_combine_before_fused_layer(const Context& ctx, const AttentionParams& params);

// Whether attention_splits combines the splits itself, in thread block clusters
// (few_rows_cluster.cuh). attention_combine then has nothing to do.
bool is_combined_in_clusters(const Context& ctx, const AttentionParams& params);

// The partial results in scratch.
struct Partials {
  float* acc;        // [splits, T * Hq, D], dimensions in the order of dimension_at()
  float2* states;    // [splits, T * Hq]: row maximum, and sum of probabilities
  int64_t num_rows;  // T * Hq

  __device__ Partials(float* scratch, int num_splits, int num_rows_, int head_dim)
      : acc(scratch),
        states(reinterpret_cast<float2*>(scratch + num_splits * (int64_t{num_rows_} * head_dim))),
        num_rows(num_rows_) {}
};

// The dimension at a place of an acc row. The dimensions that one thread holds of an mma tile are
// adjacent, so the thread writes 16 bytes at a time.
__device__ constexpr int dimension_at(int place) {
  return place / 16 * 16 + place / 2 % 2 * 8 + place / 4 % 4 * 2 + place % 2;
}

// Order of additions: kSplitsPerGroup consecutive splits form a split group and are summed first.
// The groups of kSplitsTogether splits are summed next, in order. These sums are added last, in
// order.
constexpr int kLog2SplitsPerGroup = 2, kSplitsPerGroup = 1 << kLog2SplitsPerGroup;
constexpr int kSplitsTogether = 8, kGroupsTogether = kSplitsTogether / kSplitsPerGroup;

// merges_from() is a number of splits. If a sequence of a verified tree has at least as many
// splits, attention_splits sums each split group itself. It writes the sum in the place of the
// group's first split. kNeverMerge: attention_splits never sums groups.
constexpr int kNeverMerge = INT_MAX;
int merges_from(const Context& ctx, const AttentionParams& params);

// make_args() for attention_decode and for kernels that combine its partial results.
template <typename T>
AttentionArgs<T> make_decode_args(const Context& ctx, const AttentionParams& params) {
  AttentionArgs<T> args = make_args<T>(params);
  args.merge_from = merges_from(ctx, params);
  return args;
}

// The splits [begin, count) of a token. Splits before `begin` are outside its window and may be
// missing. If split groups are merged (shift > 0), only the first split of each group has a partial
// result.
struct RowSplits {
  // `begin` and `count` depend only on data that were complete before this pass.
  static constexpr bool kIsOld = true;
  // attention_splits writes `out` for a token with one split.
  static constexpr bool kSkipsOne = true;

  int begin, count, shift;

  template <typename T>
  __device__ __forceinline__ RowSplits(const AttentionArgs<T>& args, int row, int /*head*/)
      : RowSplits(args, row) {}

  template <typename T>
  __device__ __forceinline__ RowSplits(const AttentionArgs<T>& args, int row) {
    const StepTokens& tokens = args.tokens;
    int own, end, last;
    if (tokens.num_tokens == 1 || (args.by_position && tokens.num_seqs == 1)) {
      own = tokens.positions[row];  // two independent loads instead of a sequence of three
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
  // The split whose partial result contains `split`.
  __device__ __forceinline__ int partial(int split) const { return split >> shift << shift; }
  __device__ __forceinline__ bool has(int split) const { return split >= begin && split < count; }
};

// The sum of the probabilities of a token and query head. Order: the splits of a group, every
// eighth group, then a tree reduction. add_split_groups: each lane adds `part`, the weighted sum of
// one of 32 splits. If split groups are merged (are_merged), it is the sum of one of 32 groups.
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
  const int apart = are_merged ? 1 : kSplitsPerGroup;  // distance of lanes with adjacent groups
#pragma unroll
  for (int i = 1; i < 32 / kSplitsPerGroup; i *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, i * apart));
  }
  return sum;
}

// kSplitsTogether splits of four dimensions of a token and query head.
struct SplitParts {
  float part[kSplitsTogether][4];

  // acc: the accumulators of the token and head. A missing or merged split loads another split's
  // values; its weight is 0.
  template <typename Splits>
  __device__ __forceinline__ void load(const float* acc, int64_t acc_stride, int at,
                                       const Splits& splits) {
#pragma unroll
    for (int i = 0; i < kSplitsTogether; ++i) {
      const int s = ::min(::max(at * kSplitsTogether + i, splits.begin), splits.count - 1);
      *reinterpret_cast<float4*>(part[i]) =
          *reinterpret_cast<const float4*>(acc + splits.partial(s) * acc_stride);
    }
  }
  // Adds part * weight in the order of splits, then of split groups. `states` are those of the
  // splits.
  __device__ __forceinline__ void add_up(float (&sum)[4], const float2* states,
                                         float row_max) const {
#pragma unroll
    for (int group = 0; group < kGroupsTogether; ++group) {
      float group_sum[4] = {};
#pragma unroll
      for (int i = group * kSplitsPerGroup; i < (group + 1) * kSplitsPerGroup; ++i) {
        const float weight = weight_of(states[i].x, row_max);
#pragma unroll
        for (int j = 0; j < 4; ++j) group_sum[j] = __fmaf_rn(part[i][j], weight, group_sum[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sum[j] = group == 0 ? group_sum[j] : __fadd_rn(sum[j], group_sum[j]);
    }
  }
};

// The row maximum and sum of a token and head, by one warp. `states` has num_groups split groups; a
// missing split has the state (-inf, 0).
__device__ __forceinline__ float2 row_max_and_sum(const float2* states, int num_groups) {
  const int lane = threadIdx.x % 32;
  float row_max = kMinusInfinity;
  for (int s = lane; s < num_groups * kSplitsPerGroup; s += 32) {
    row_max = fmaxf(row_max, states[s].x);
  }
  row_max = warp_reduce(row_max, Max{});
  float sum = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int group = first + lane;
    float group_sum = 0;
#pragma unroll
    for (int s = group * kSplitsPerGroup; s < (group + 1) * kSplitsPerGroup && group < num_groups;
         ++s) {
      group_sum = __fmaf_rn(states[s].y, weight_of(states[s].x, row_max), group_sum);
    }
    sum = add_split_groups(sum, group_sum, true);
  }
  return make_float2(row_max, sum_of_split_groups(sum, true));
}

}  // namespace cpmcu::cuda
