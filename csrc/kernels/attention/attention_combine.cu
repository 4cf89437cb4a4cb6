// The partial results of splits become rows of `out`.
//
// Bound: latency for few rows, which have all splits loaded at once; else the partial results,
// which are read once from L2. How they are added up is laid down in decode.cuh.
#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/attention/combine.cuh"

namespace cpmcu::cuda {
namespace {

// A run of splits, and four of the dimensions of a row of a head.
struct SplitRun {
  static constexpr int kSplits = kSplitsOfRun;
  float part[kSplits][4];

  // acc: of the row of the head. Splits that do not exist will add 0.
  __device__ __forceinline__ void load(const float* acc, int64_t acc_stride, int run,
                                       const RowSplits& splits) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const int64_t s = ::min(::max(run * kSplits + i, splits.begin), splits.count - 1);
      *reinterpret_cast<float4*>(part[i]) = *reinterpret_cast<const float4*>(acc + s * acc_stride);
    }
  }
  // sum += part times weight, split by split; `states` are its splits'.
  __device__ __forceinline__ void add_to(float (&sum)[4], const float2* states, float max_of_row,
                                         float scale_log2) const {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const float weight = weight_of(states[i].x, max_of_row, scale_log2);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = __fmaf_rn(part[i][j], weight, sum[j]);
    }
  }
};

// Block: one row of one query head, and of its dimensions 1 / kParts. A thread owns four dimensions
// and every kGroups-th SplitRun; the runs' sums are added in order. Splits that do not exist would
// add 0, so their number does not matter, nor does kParts.
template <typename T, int kDim_, int kParts_, int kThreads_>
struct CombineConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kParts = kParts_;  // more where rows are too few to fill the chip
  static constexpr int kColumns = kDim / 4 / kParts;
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kThreads / kColumns;
  static constexpr int kRuns = 32;  // of which the sums find room
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_combine_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                             int max_splits) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  using Run = SplitRun;
  __shared__ float4 run_sums[Config::kRuns][Config::kColumns];
  extern __shared__ float2 states[];  // maximum and sum of all splits of the row

  ptx::pdl_launch();  // before the wait: the next kernel waits for this one in any case
  const RowSplits splits(args, blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) / Config::kParts;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.num_heads + head;
  const int thread_column = static_cast<int>(threadIdx.x) % Config::kColumns;
  const int column =
      (static_cast<int>(blockIdx.x) % Config::kParts * Config::kColumns + thread_column) * 4;
  const Partials partials(args.scratch, max_splits, args.rows.num_rows * args.num_heads, kDim);
  const float* acc = partials.acc + row * kDim + column;
  const float2* ml = partials.ml + row;
  ptx::pdl_wait();
  if (splits.count == 1) return;  // written already

  const int num_runs = (splits.count + Run::kSplits - 1) / Run::kSplits;
  int run = static_cast<int>(threadIdx.x) / Config::kColumns;
  const bool adds_runs = run == 0;
  Run parts;
  auto load_run = [&]() {
    if (run >= num_runs) return;
    parts.load(acc, partials.num_rows * kDim, run, splits);
  };
  load_run();
  // By all warps, while that is on its way: each split's once.
  for (int s = static_cast<int>(threadIdx.x); s < num_runs * Run::kSplits; s += Config::kThreads) {
    states[s] = splits.has(s) ? ml[s * partials.num_rows] : make_float2(kMinusInfinity, 0);
  }
  __syncthreads();
  const auto [max, sum] = max_and_sum<4>(states, 1, splits, args.scale_log2);

  float total[4] = {};
  for (int first_run = 0; first_run < num_runs; first_run += Config::kRuns) {
    const int end_run = min(first_run + Config::kRuns, num_runs);
    for (; run < end_run; run += Config::kGroups, load_run()) {
      float run_sum[4] = {};
      parts.add_to(run_sum, states + run * Run::kSplits, max, args.scale_log2);
      run_sums[run - first_run][thread_column] = {run_sum[0], run_sum[1], run_sum[2], run_sum[3]};
    }
    __syncthreads();
    for (int i = 0; i < end_run - first_run && adds_runs; ++i) {
      const float4 run_sum = run_sums[i][thread_column];
      total[0] = __fadd_rn(total[0], run_sum.x);
      total[1] = __fadd_rn(total[1], run_sum.y);
      total[2] = __fadd_rn(total[2], run_sum.z);
      total[3] = __fadd_rn(total[3], run_sum.w);
    }
    __syncthreads();
  }
  if (!adds_runs) return;
  const float inverse = inverse_of(sum);
  *reinterpret_cast<uint2*>(args.out + row * kDim + column) =
      make_uint2(pack2<T>(normalised(total[0], inverse), normalised(total[1], inverse)),
                 pack2<T>(normalised(total[2], inverse), normalised(total[3], inverse)));
}

// ---- launchers

template <typename T, int kDim>
void launch_combine(const Context& ctx, const AttentionParams& params) {
  const int num_rows = params.rows.num_rows, max_splits = num_splits(params.rows.max_kv);
  const auto combine = [&](auto config) {
    using Config = decltype(config);
    const auto kernel = attention_combine_kernel<Config>;
    const int runs = (max_splits + kSplitsOfRun - 1) / kSplitsOfRun;
    const size_t bytes = runs * kSplitsOfRun * sizeof(float2);
    allow_shared_bytes(kernel, bytes + Config::kRuns * Config::kColumns * sizeof(float4));
    launch(ctx, kernel, dim3(params.num_heads * Config::kParts, num_rows), Config::kThreads, bytes,
           make_args<T>(params), max_splits);
  };
  // Few rows have all runs of splits loaded at once.
  using Few = CombineConfig<T, kDim, 4, 128>;
  if (params.num_heads * num_rows >= ctx.sm_count) {
    combine(CombineConfig<T, kDim, 1, 128>{});
  } else if (max_splits <= Few::kGroups * kSplitsOfRun) {
    combine(Few{});
  } else {
    combine(CombineConfig<T, kDim, 4, 256>{});
  }
}

}  // namespace

// Graph-safe: yes. Reads on the device: positions, if by_position or of one row; else each row's
// sequence, slots, row ranges and lengths.
void attention_combine(const Context& ctx, const AttentionParams& params) {
  if (params.rows.num_rows == 0 || num_splits(params.rows.max_kv) == 1) return;
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_combine: head_dim", params.head_dim, [&](auto dim) {
      launch_combine<decltype(element), dim.value>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
