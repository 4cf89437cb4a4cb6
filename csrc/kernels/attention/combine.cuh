// How partial results of splits become rows of `out`: what attention_combine shares with a chain of
// products that reads `out`. The order of additions is laid down in attention_decode.cu.
#pragma once

#include <type_traits>

#include "core/reduce.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {

// Up to so many splits of one row are combined by a chain of products, in each of its blocks anew.
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

  RowSplits() = default;
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

// A run of splits, and kWidth of the dimensions of a row of a head.
template <int kWidth>
struct SplitRun {
  static constexpr int kSplits = kSplitsOfRun;
  float part[kSplits][kWidth];
  float max[kSplits];

  // acc, ml: of the row of the head. Splits that do not exist will add 0.
  __device__ __forceinline__ void load(const float* acc, int64_t acc_stride, const float2* ml,
                                       int64_t ml_stride, int run, const RowSplits& splits) {
    using Vector = std::conditional_t<kWidth == 4, float4, float2>;
    static_assert(sizeof(Vector) == kWidth * sizeof(float));
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const int64_t s = ::min(::max(run * kSplits + i, splits.begin), splits.count - 1);
      const float state_max = ml[s * ml_stride].x;
      max[i] = s == run * kSplits + i ? state_max : kMinusInfinity;
      *reinterpret_cast<Vector*>(part[i]) = *reinterpret_cast<const Vector*>(acc + s * acc_stride);
    }
  }
  // sum += part times weight, split by split.
  __device__ __forceinline__ void add_to(float (&sum)[kWidth], float max_of_row,
                                         float scale_log2) const {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const float weight = weight_of(max[i], max_of_row, scale_log2);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] = __fmaf_rn(part[i][j], weight, sum[j]);
    }
  }
};

// By a warp: maximum and sum over all splits of a row of a head, one split a lane, kStates of which
// are loaded at a time.
template <int kStates>
__device__ __forceinline__ float2 max_and_sum(const float2* ml, int64_t ml_stride,
                                              const RowSplits& splits, float scale_log2) {
  const int lane = threadIdx.x % 32;
  auto each_state = [&](auto use) {
#pragma unroll 1
    for (int first = lane; first < splits.count; first += kStates * 32) {
      float2 state[kStates];
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        const int s = first + i * 32;
        state[i] = splits.has(s) ? ml[s * ml_stride] : make_float2(kMinusInfinity, 0);
      }
#pragma unroll
      for (int i = 0; i < kStates; ++i) use(state[i]);
    }
  };
  float max = kMinusInfinity;
  each_state([&](const float2& state) { max = fmaxf(max, state.x); });
  max = warp_reduce(max, Max{});
  float sum = 0;
  each_state([&](const float2& state) {
    sum = __fmaf_rn(state.y, weight_of(state.x, max, scale_log2), sum);
  });
  return make_float2(max, warp_reduce(sum, Sum{}));
}

}  // namespace cpmcu::cuda
