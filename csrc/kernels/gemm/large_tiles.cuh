// Common code of the Hopper GEMMs of many rows: the pipeline, the roles of warpgroups, the order of
// tiles, and the transposing epilogue.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/x_rows.cuh"

namespace cpmcu::cuda {
namespace {

// Shared memory of a CTA: rows of x of all stages, then W of all stages, then kOutBytes for the
// epilogue of each of two warpgroups; at most kBudget.
template <int kXBytes, int kWBytes, int kOutBytes, int kBudget = kRingBytes>
struct LargeRing {
  static constexpr int kStages = (kBudget - 2 * kOutBytes) / (kXBytes + kWBytes);
  static constexpr int kBytes = kStages * (kXBytes + kWBytes) + 2 * kOutBytes;
  static constexpr int kBarriers = 2 * kStages, kStageBytes = kXBytes + kWBytes;
  uint32_t data, barriers;

  __device__ __forceinline__ LargeRing(const void* data, const void* barriers)
      : data(ptx::shared_address(data)), barriers(ptx::shared_address(barriers)) {
    ptx::opaque(this->data);  // so it is computed once
    ptx::opaque(this->barriers);
  }
  __device__ __forceinline__ uint32_t rows(int stage) const { return data + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return data + kStages * kXBytes + stage * kWBytes;
  }
  __device__ __forceinline__ uint32_t out(int warpgroup) const {
    return weights(kStages) + warpgroup * kOutBytes;
  }
  // full: the data of a stage has arrived. empty: all warps of both CTAs are done with it.
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }

  static __device__ __forceinline__ void advance(int& stage, int& parity) {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // Called by each consumer warp when it is done with a stage. `peer_empty`: empty(0) of the other
  // CTA.
  __device__ __forceinline__ void release(int stage, uint32_t peer_empty) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(empty(stage));
      ptx::mbarrier_arrive_cluster(peer_empty + 8 * stage);
    }
  }
};

// Runs a CTA of a cluster of two. One thread of the third warpgroup calls `produce`, which waits
// for earlier kernels itself. The other two warpgroups wait for earlier kernels, then call
// `multiply`.
constexpr int kLargeThreads = kThreads + 128;
template <typename Ring, typename F, typename G>
__device__ __forceinline__ void run_large(const Ring& ring, F produce, G multiply) {
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
    ptx::give_registers<kProducerRegisters>();
    threadIdx.x == kThreads ? produce() : ptx::pdl_wait();
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::pdl_wait();
    multiply();
  }
  ptx::cluster_arrive();  // the other CTA's copies and arrivals may still target this CTA
  ptx::cluster_wait();
}

constexpr int kStageK = 64;  // columns (k) of dense weights in one stage

// The sums of a warpgroup: its 64 rows of W times the rows of x, over `k_blocks` stages from
// `stage` on. A stage is released once the next stage's wgmma group is issued.
template <typename T, typename Ring, int kGroups>
__device__ __forceinline__ void multiply_stages(float (&sums)[kGroups][4], const Ring& ring,
                                                int k_blocks, int& stage, int& parity,
                                                uint32_t peer_empty) {
  const int warpgroup = ptx::uniform_warp() / 4;
  int before = 0;  // the stage of the wgmma group still in flight
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(ring.full(stage), parity);
    const uint64_t w = ptx::wgmma_descriptor_swizzle128(ring.weights(stage) + warpgroup * 64 * 128);
    const uint64_t x = ptx::wgmma_descriptor_swizzle128(ring.rows(stage));
    ptx::wgmma_fence();
#pragma unroll
    // 16 k are 32 bytes; descriptors count 16
    for (int step = 0; step < kStageK / 16; ++step) {
      ptx::wgmma_64xNx16<T, kGroups>(sums, w + step * 2, x + step * 2, k_block + step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (k_block > 0) ring.release(before, peer_empty);
    before = stage;
    Ring::advance(stage, parity);
  }
  ptx::wgmma_wait<0>();
  ring.release(before, peer_empty);
}

// The order of a cluster's tiles: for each tile of W up to kTogether tiles of x, which stay in L2.
struct LargeTiles {
  static constexpr int kTogether = 16;
  int of_w, of_x;  // number of tiles of W, and of tiles of x

  struct Place {
    int w, x;
  };
  __host__ __device__ __forceinline__ int count() const { return of_w * of_x; }
  // The first tile of this cluster, and the distance to its next one.
  static __device__ __forceinline__ int first() { return blockIdx.x / 2; }
  static __device__ __forceinline__ int step() { return gridDim.x / 2; }
  __device__ __forceinline__ Place place(int tile) const {
    const int group = tile / (of_w * kTogether), in_group = tile - group * of_w * kTogether;
    const int width = min(kTogether, of_x - group * kTogether);
    const int w = in_group / width;
    return {w, group * kTogether + in_group - w * width};
  }
};

// Barrier of the threads of one consumer warpgroup.
__device__ __forceinline__ void meet(int warpgroup) {
  warpgroup == 0 ? ptx::named_barrier<1, 128>() : ptx::named_barrier<2, 128>();
}

// The inverse of pack2<T>.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
  }
}

// Bytes of shared memory for a row of y, which has up to 64 columns.
constexpr int kLargeRowBytes = 128;

// Stores a warpgroup's wgmma sums of 64 rows of W x 8 kGroups rows of x. The sums pass through
// `shared` (kLargeRowBytes for each row of x), so that each lane stores 16 bytes of a row of y. All
// threads of the warpgroup synchronise before `shared` is written and after it is read.
template <typename T>
struct LargeOut {
  T* y;  // [m, width]; width and stride are multiples of 8
  int width;
  int64_t stride;
  int m;
  bool reads;  // update() needs the old y

  __device__ __forceinline__ LargeOut(void* y, int width, int64_t stride, int m, bool reads)
      : y(static_cast<T*>(y)), width(width), stride(stride), m(m), reads(reads) {}

  // y = update(sum, old y or 0), for rows of x from first_row and columns from first_column.
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
  // y = value(gate, up) for a gated W, whose rows alternate: eight of gate, eight of up.
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
  // Calls f(address in shared memory, address in y) for this thread's chunks of 8 columns.
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
