// What products of many rows of x share on Hopper: the order of their tiles, and how y leaves,
// whose rows are columns of the sums.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"

namespace cpmcu::cuda {
namespace {

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
