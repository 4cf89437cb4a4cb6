// The combination of splits within attention_decode. A thread block cluster has all splits of a KV
// head, one in each CTA. The CTAs share the packed rows: the CTA of split p mod the number of
// splits combines row p. The others send it their partial results of this row through distributed
// shared memory. The additions and their order are those of attention_combine, so the bits are the
// same.
//
// CTAs after the last split end at once. The cluster barrier does not wait for threads that ended.
#pragma once

#include "kernels/attention/decode.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kMaxClusterSplits = 16;  // CTAs of a cluster on Hopper
constexpr int kMaxClusterRows = 8;     // packed rows
// CTAs of the cluster that has these splits.
inline int cluster_size_of(int splits) {
  return splits <= 2 ? 2 : splits <= 4 ? 4 : splits <= 8 ? 8 : 16;
}

template <int kDim>
struct ClusterSums {
  // Partial results of the rows that this CTA combines, row by row, split by split.
  float4 acc[kMaxClusterSplits][kDim / 4];
  // Row maxima and sums of these rows. A missing split has (-inf, 0).
  float2 states[kMaxClusterRows / 2][kMaxClusterSplits];
  uint64_t barrier;

  // The rows that the CTA of `split` combines.
  static __device__ __forceinline__ int num_rows_of(int split, int num_splits, int num_rows) {
    return split < num_rows ? (num_rows - 1 - split) / num_splits + 1 : 0;
  }

  // Every CTA calls it first.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    ptx::cluster_arrive();
  }
  __device__ __forceinline__ void expect(int split, int num_splits, int num_rows) {
    const int mine = num_rows_of(split, num_splits, num_rows), thread = threadIdx.x;
    if (thread == 0) {
      ptx::mbarrier_expect_bytes(
          ptx::shared_address(&barrier),
          mine * num_splits * static_cast<int>(sizeof(acc[0]) + sizeof(float2)));
    }
    const int s = thread % kMaxClusterSplits;
    if (s >= num_splits && thread / kMaxClusterSplits < mine) {
      states[thread / kMaxClusterSplits][s] = make_float2(kMinusInfinity, 0);
    }
  }

  // Addresses in the CTA that combines a row.
  struct Target {
    uint32_t acc, state, barrier;
  };
  __device__ __forceinline__ Target target_of(int row, int split, int num_splits) {
    const int place = row / num_splits, rank = gridDim.y - 1 - row % num_splits;
    const auto at = [rank](const void* shared) {
      return ptx::cluster_address(ptx::shared_address(shared), rank);
    };
    return {.acc = at(acc[place * num_splits + split]),
            .state = at(states[place] + split),
            .barrier = at(&barrier)};
  }
  // Sends the dimensions [column, column + kColumns) of the packed rows [0, 8). `target`: of row
  // lane / 4.
  template <int kColumns>
  static __device__ __forceinline__ void send(const Target& target, const RowTile<kColumns>& state,
                                              int column, int lane, int num_rows) {
    ptx::cluster_wait();  // all CTAs have initialised their barriers
    if (lane / 4 >= num_rows) return;
    const uint32_t to = target.acc + (column + lane % 4 * 4) * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      const float (&a)[4] = state.acc[n];
      const float (&b)[4] = state.acc[n + 1];
      ptx::store_cluster16(to + n * 32, {a[0], a[1], b[0], b[1]}, target.barrier);
    }
    if (column == 0 && lane % 4 == 0) {
      ptx::store_cluster8(target.state, make_float2(state.row_max[0], state.sum[0]),
                          target.barrier);
    }
  }

  // Combines this CTA's rows, each by one warp.
  template <int kWarps, int kRows, typename T>
  __device__ __forceinline__ void combine(const AttentionArgs<T>& args,
                                          const PackedRows<kRows>& packed, int split,
                                          int num_splits, int num_rows) {
    struct AllSplits {
      int begin, count;
      __device__ __forceinline__ int partial(int split) const { return split; }
    };
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int mine = num_rows_of(split, num_splits, num_rows);
    const int num_sums = (num_splits + kSplitsTogether - 1) / kSplitsTogether;
#pragma unroll 1
    for (int i = ptx::uniform_warp(); i < mine; i += kWarps) {
      ptx::mbarrier_wait(ptx::shared_address(&barrier), 0);
      const auto [row_max, sum] = row_max_and_sum(states[i], num_sums * kGroupsTogether);
      const int column = lane * 4;
      if (column >= kDim) continue;
      const auto* from = reinterpret_cast<const float*>(acc[i * num_splits]) + column;
      float total[4] = {};
#pragma unroll 1
      for (int at = 0; at < num_sums; ++at) {
        SplitParts parts;
        float part_sum[4];
        parts.load(from, kDim, at, AllSplits{0, num_splits});
        parts.add_up(part_sum, states[i] + at * kSplitsTogether, row_max);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] = __fadd_rn(total[j], part_sum[j]);
      }
      const float inverse = inverse_of(sum);
      T* to = args.out + static_cast<int64_t>(packed.outs[i * num_splits + split]) * kDim;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        *reinterpret_cast<uint32_t*>(to + dimension_at(column + j)) =
            pack2<T>(normalised(total[j], inverse), normalised(total[j + 1], inverse));
      }
    }
  }
};

}  // namespace
}  // namespace cpmcu::cuda
