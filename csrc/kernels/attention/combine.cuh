// How partial results of splits become rows of `out`: what attention_combine shares with a chain of
// products that reads `out`. The order of additions is laid down in decode.cuh.
#pragma once

#include "core/reduce.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

// Up to so many splits are combined by a chain of products however few the rows: those of one row
// in each of its blocks anew.
constexpr int kMaxCombinedSplits = 32;

// Where the partial results lie in scratch.
struct Partials {
  float* acc;  // [splits, T * Hq, D]
  float2* ml;  // [splits, T * Hq]: maximum and sum
  int64_t num_rows;

  __device__ Partials(float* scratch, int num_splits, int num_rows_, int head_dim)
      : acc(scratch),
        ml(reinterpret_cast<float2*>(scratch + num_splits * (int64_t{num_rows_} * head_dim))),
        num_rows(num_rows_) {}
};

// The splits of a row: [begin, count). Those before are outside of its window and may be missing.
struct RowSplits {
  int begin, count;

  template <typename T>
  __device__ __forceinline__ RowSplits(const AttentionArgs<T>& args, int row) {
    int own, end;
    if (args.by_position || args.rows.num_rows == 1) {  // one load instead of three, one by one
      own = args.rows.positions[row];
      end = own + 1;
    } else {
      const Sequence seq = load_sequence(args.rows, args.rows.row_seqs[row]);
      own = seq.first_cell + row - seq.row_begin;
      end = seq.end();
    }
    begin = num_splits(window_begin(own, args.window) + 1) - 1;
    count = num_splits(end);
  }
  __device__ __forceinline__ bool has(int split) const { return split >= begin && split < count; }
};

// So many splits in order, from a multiple on, are summed first; then these sums, in order.
constexpr int kSplitsOfRun = 8;

// By a warp: maximum and sum over all splits of a row of a head, one split a lane, kStates of which
// are loaded at a time, and once if that is all.
template <int kStates>
__device__ __forceinline__ float2 max_and_sum(const float2* ml, int64_t ml_stride,
                                              const RowSplits& splits, float scale_log2) {
  constexpr int kAtOnce = kStates * 32;
  const int lane = threadIdx.x % 32;
  float2 state[kStates];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const int s = first + i * 32;
      state[i] = splits.has(s) ? ml[s * ml_stride] : make_float2(kMinusInfinity, 0);
    }
  };
  float max = kMinusInfinity;
#pragma unroll 1
  for (int first = lane; first < splits.count; first += kAtOnce) {
    load(first);
#pragma unroll
    for (int i = 0; i < kStates; ++i) max = fmaxf(max, state[i].x);
  }
  max = warp_reduce(max, Max{});
  float sum = 0;
#pragma unroll 1
  for (int first = lane; first < splits.count; first += kAtOnce) {
    if (splits.count > kAtOnce) load(first);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      sum = __fmaf_rn(state[i].y, weight_of(state[i].x, max, scale_log2), sum);
    }
  }
  return make_float2(max, warp_reduce(sum, Sum{}));
}

}  // namespace cpmcu::cuda
