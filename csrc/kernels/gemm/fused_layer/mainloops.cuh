// Mainloops of the fused layer kernel: how a tile of W is loaded into a stage and multiplied.
#pragma once

#include "kernels/gemm/dense_mma.cuh"
#include "kernels/gemm/fused_layer/args.cuh"
#include "kernels/gemm/packed/wgmma.cuh"

namespace cpmcu::cuda::fused {

// W in weight blocks: one bulk copy loads a weight block of 256 rows x 128 k. The same stage holds
// 8 kGroups rows of x.
template <typename Mma, typename T, int kGroups_, typename Unpacker>
struct PackedMainloop {
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowsBytes = 8 * kGroups * kRowBytes;
  static constexpr bool kHas8Bits = Unpacker::kBits == 8;
  static constexpr int kWeightBytes = Unpacker::kBlock + Unpacker::kExtraBytes;
  static constexpr float kScale = Unpacker::template kFactor<T>;  // factor in the sums
  // Weight blocks in flight per SM. Two keep memory busy. With more, SMs share the bandwidth less
  // evenly, and x, partial sums and counters queue behind weights. The limit saves 4 of 56 us a
  // layer at one row. Above 16 rows the consumers are the bottleneck, and more blocks are better.
  static constexpr int kInFlight = kGroups <= 2 ? 2 : kGroups == 8 && !kHas8Bits ? 5 : 3;

  // Weight blocks that each CTA prefetches to L2 (prefetch.cuh), 18 MB in all. One row only.
  static constexpr int kPrefetchBlocks = kGroups == 1 ? (kHas8Bits ? 4 : 8) : 0;

  // Whether each CTA may combine its slice of x: one row, and enough stages.
  static constexpr bool kCombinesSlice = kGroups == 1 && !kHas8Bits;

  typename Mma::template LaneRows<kGroups> lane_rows;
  LaneWeights<Unpacker> lane_weights;
  uint32_t scale_form;

  __device__ __forceinline__ explicit PackedMainloop(const GemmArgs& gemm)
      : lane_weights(gemm.scale_form), scale_form(gemm.scale_form) {
    ptx::opaque(scale_form);  // so it is not reloaded for every block
  }

  // Byte offset of element k of row 0 in a stage; see copy_rows.
  static __device__ __forceinline__ int row_offset(int k) { return k / 64 * 1024 + k % 64 * 2; }

  struct Source {
    const char* from;
    int bytes;

    __device__ __forceinline__ Source(const GemmArgs& gemm, int tile, int k_block)
        : from(gemm.blocks + (int64_t{tile} * gemm.k_blocks + k_block) * gemm.block_bytes),
          bytes(gemm.block_bytes) {
      ptx::opaque(from);  // so it is computed before the wait
    }
    __device__ __forceinline__ void next() { from += bytes; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier, uint64_t policy) const {
      ptx::mbarrier_expect_bytes(barrier, bytes);
      ptx::bulk_copy(to, from, bytes, barrier, policy);
    }
  };
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const GemmArgs& gemm, int k_block,
                                                    uint32_t barrier) {
    ptx::mbarrier_expect_bytes(barrier, kRowsBytes);
    copy_rows<kGroups>(to, &gemm.x_map, k_block, barrier);
  }
  template <typename F, typename G>
  __device__ __forceinline__ void accumulate_block(float (&sums)[2][kGroups][4], uint32_t rows,
                                                   uint32_t weights, F poll, G release) const {
    cuda::accumulate_block<Mma, Unpacker, T, kGroups>(sums, rows, weights, lane_rows, lane_weights,
                                                      static_cast<uint8_t>(scale_form), poll,
                                                      release);
  }
};

// 16-bit W: 256 rows x 64 k as two boxes of 128 rows. Rows have 128 bytes; TMA swizzles their
// 16-byte chunks within 8 rows. A gated W has 128 rows of gate and the matching 128 of up. The
// ldmatrix addresses interleave them by eight, as 4-bit blocks store them. Up to 64 rows, the loads
// of W take longer than the multiplication.
template <typename T, int kGroups_>
struct DenseMainloop {
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kCombinesSlice = false;
  static constexpr int kBlockK = kDenseK, kBoxRows = kPackedRows / 2;
  static constexpr int kRowsBytes = 8 * kGroups * kDenseRowBytes;
  static constexpr int kWeightBytes = kPackedRows * kDenseRowBytes;
  static constexpr float kScale = 1;
  static constexpr int kInFlight = 2, kPrefetchBlocks = 0;

  LaneRows<kGroups> lane_rows;
  uint32_t lane_weights[2];  // the lane's ldmatrix row in both m16 tiles: first or second 8 k

  __device__ __forceinline__ explicit DenseMainloop(const GemmArgs& gemm) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int row = threadIdx.x / 32 * 32 + t * 16 + lane % 16;
      const int at = gemm.gated ? row / 8 % 2 * kBoxRows + row / 16 * 8 + row % 8 : row;
      lane_weights[t] = dense_row_offset(at);
    }
  }

  struct Source {
    const TensorMap* map;
    int k, row, second;  // first rows of both boxes

    __device__ __forceinline__ Source(const GemmArgs& gemm, int tile, int k_block)
        : map(&gemm.w_map),
          k(k_block * kBlockK),
          row(tile * (gemm.gated ? kBoxRows : kPackedRows)),
          second(row + (gemm.gated ? gemm.n / 2 : kBoxRows)) {}
    __device__ __forceinline__ void next() { k += kBlockK; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier, uint64_t policy) const {
      ptx::mbarrier_expect_bytes(barrier, kWeightBytes);
      ptx::tensor_copy(to, map, k, row, barrier, policy);
      ptx::tensor_copy(to + kWeightBytes / 2, map, k, second, barrier, policy);
    }
  };
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const GemmArgs& gemm, int k_block,
                                                    uint32_t barrier) {
    ptx::mbarrier_expect_bytes(barrier, kRowsBytes);
    ptx::tensor_copy(to, &gemm.x_map, k_block * kBlockK, 0, barrier);
  }
  template <typename F, typename G>
  __device__ __forceinline__ void accumulate_block(float (&sums)[2][kGroups][4], uint32_t rows,
                                                   uint32_t weights, F poll, G release) const {
    accumulate_dense<T>(sums, rows, {weights + lane_weights[0], weights + lane_weights[1]},
                        lane_rows);
    poll();
    release();
  }
};

}  // namespace cpmcu::cuda::fused
