// What products of many rows of x share on Hopper: a ring in shared memory, what the warpgroups of
// a block do, the order of tiles, and how y leaves, whose rows are columns of the sums.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/x_rows.cuh"

namespace cpmcu::cuda {
namespace {

// Of a block of threads: stages of rows of x and of W, all rows first, and behind them what each of
// two warpgroups needs for its sums or y.
template <int kXBytes, int kWBytes, int kOutBytes>
struct LargeRing {
  static constexpr int kStages = (kRingBytes - 2 * kOutBytes) / (kXBytes + kWBytes);
  static constexpr int kBytes = kStages * (kXBytes + kWBytes) + 2 * kOutBytes;
  static constexpr int kBarriers = 2 * kStages, kStageBytes = kXBytes + kWBytes;
  uint32_t data, barriers;

  __device__ __forceinline__ LargeRing(const void* data, const void* barriers)
      : data(ptx::shared_address(data)), barriers(ptx::shared_address(barriers)) {
    ptx::opaque(this->data);  // computed once
    ptx::opaque(this->barriers);
  }
  __device__ __forceinline__ uint32_t rows(int stage) const { return data + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return data + kStages * kXBytes + stage * kWBytes;
  }
  __device__ __forceinline__ uint32_t out(int warpgroup) const {
    return weights(kStages) + warpgroup * kOutBytes;
  }
  // Whether all of a stage has come; whether all warps of both blocks of the cluster are done with
  // it.
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }

  static __device__ __forceinline__ void advance(int& stage, int& parity) {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // By a warp that is done with a stage. `peer_empty`: empty(0) of the other block.
  __device__ __forceinline__ void release(int stage, uint32_t peer_empty) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(empty(stage));
      ptx::mbarrier_arrive_cluster(peer_empty + 8 * stage);
    }
  }
};

// A block of a cluster of two, three warpgroups: a thread of the third calls `feed`, which waits
// for the kernels before by itself; the others call `multiply` when those are done.
constexpr int kLargeThreads = kThreads + 128;
template <typename Ring, typename F, typename G>
__device__ __forceinline__ void run_large(const Ring& ring, F feed, G multiply) {
  ptx::pdl_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Ring::kStages; ++i) {
      ptx::mbarrier_init(ring.full(i), 1);
      ptx::mbarrier_init(ring.empty(i), 2 * kWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (ptx::uniform_warp() >= kWarps) {
    ptx::give_registers<kFeedingRegisters>();
    threadIdx.x == kThreads ? feed() : ptx::pdl_wait();
    __syncwarp();
  } else {
    ptx::take_registers<kMultiplyingRegisters>();
    ptx::pdl_wait();
    multiply();
  }
  ptx::cluster_arrive();  // or the other block's copies and arrivals find nobody
  ptx::cluster_wait();
}

// The tiles of a cluster of two blocks, one after another: of x up to kTogether tiles, which stay
// in L2, for each of W.
struct LargeTiles {
  static constexpr int kTogether = 16;
  int of_w, of_x;  // how many there are

  struct Place {
    int w, x;
  };
  __host__ __device__ __forceinline__ int count() const { return of_w * of_x; }
  // This cluster's.
  static __device__ __forceinline__ int first() { return blockIdx.x / 2; }
  static __device__ __forceinline__ int step() { return gridDim.x / 2; }
  __device__ __forceinline__ Place place(int tile) const {
    const int group = tile / (of_w * kTogether), in_group = tile - group * of_w * kTogether;
    const int width = min(kTogether, of_x - group * kTogether);
    const int w = in_group / width;
    return {w, group * kTogether + in_group - w * width};
  }
};

// The threads of one of two warpgroups that multiply.
__device__ __forceinline__ void meet(int warpgroup) {
  warpgroup == 0 ? ptx::named_barrier<1, 128>() : ptx::named_barrier<2, 128>();
}

// Two values that pack2<T> packed.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
  }
}

constexpr int kLargeRowBytes = 128;  // of shared memory, for up to 64 columns of a row of y

// Writes y from a warpgroup's sums of 64 rows of W and 8 kGroups rows of x, as wgmma leaves them: a
// warp has 16 rows of W. By way of `shared`, of which each of those rows of x takes kLargeRowBytes,
// so that 16 bytes of a row leave at a time. All threads of the warpgroup meet before it is written
// and after it was read.
template <typename T>
struct LargeOut {
  T* y;  // [m, width], rows `stride` apart, a multiple of 8; as is width
  int width;
  int64_t stride;
  int m;
  bool reads;  // y as it was

  __device__ __forceinline__ LargeOut(void* y, int width, int64_t stride, int m, bool reads)
      : y(static_cast<T*>(y)), width(width), stride(stride), m(m), reads(reads) {}

  // y = update(sum, y as it was, or 0) of rows of x from first_row on and columns from
  // first_column.
  template <int kGroups, typename F>
  __device__ __forceinline__ void store(const float (&sums)[kGroups][4], uint32_t shared,
                                        int warpgroup, int first_row, int first_column,
                                        F update) const {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    meet(warpgroup);
    if (reads) {
      each_chunk<8>(shared, 8 * kGroups, first_row, first_column,
                    [](uint32_t at, const uint4* y) { ptx::store_shared16(at, *y); });
      meet(warpgroup);
    }
    const uint32_t to = shared + ptx::swizzled_chunk<8>(lane / 16 * 8 + lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      uint32_t old[4] = {}, r[4];
      if (reads) ptx::ldmatrix4_trans(old, to + group * 8 * kLargeRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&sum)[4] = sums[group + i / 2];
        const float2 before = unpack2<T>(old[i]);
        r[i] = pack2<T>(update(sum[i % 2 * 2], before.x), update(sum[i % 2 * 2 + 1], before.y));
      }
      ptx::stmatrix4_trans(to + group * 8 * kLargeRowBytes, r);
    }
    meet(warpgroup);
    each_chunk<8>(shared, 8 * kGroups, first_row, first_column,
                  [](uint32_t at, uint4* y) { *y = ptx::load_shared16(at); });
    meet(warpgroup);
  }
  // The same of a gated W, whose rows are gate's and up's by turns of eight: y = value(gate, up).
  template <int kGroups, typename F>
  __device__ __forceinline__ void store_gated(const float (&sums)[kGroups][4], uint32_t shared,
                                              int warpgroup, int first_row, int first_column,
                                              F value) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    meet(warpgroup);
    const uint32_t to = shared + ptx::swizzled_chunk<8>(lane, warp);
#pragma unroll
    for (int group = 0; group < kGroups; group += 4) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&sum)[4] = sums[group + i];
        r[i] = pack2<T>(value(sum[0], sum[2]), value(sum[1], sum[3]));
      }
      ptx::stmatrix4_trans(to + group * 8 * kLargeRowBytes, r);
    }
    meet(warpgroup);
    each_chunk<4>(shared, 8 * kGroups, first_row, first_column,
                  [](uint32_t at, uint4* y) { *y = ptx::load_shared16(at); });
    meet(warpgroup);
  }

 private:
  // f(where 8 columns of a row lie in shared memory, and in y) for those of this thread.
  template <int kChunks, typename F>
  __device__ __forceinline__ void each_chunk(uint32_t shared, int num_rows, int first_row,
                                             int first_column, F f) const {
    const int chunk = threadIdx.x % kChunks, column = first_column + chunk * 8;
    if (column >= width) return;
    const int end = min(num_rows, m - first_row);
    T* const to = y + first_row * stride + column;
    for (int row = threadIdx.x % 128 / kChunks; row < end; row += 128 / kChunks) {
      f(shared + ptx::swizzled_chunk<8>(row, chunk), reinterpret_cast<uint4*>(to + row * stride));
    }
  }
};

}  // namespace
}  // namespace cpmcu::cuda
