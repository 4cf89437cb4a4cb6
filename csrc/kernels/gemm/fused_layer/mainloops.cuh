// Mainloops of the fused layer kernel: how a tile of W is loaded into a stage and multiplied.
#pragma once

#include <algorithm>

#include "kernels/gemm/dense_mma.cuh"
#include "kernels/gemm/fused_layer/args.cuh"
#include "kernels/gemm/packed/multiply.cuh"

namespace cpmcu::cuda::fused {

// How the producers fill stages.
//   kHopper  code for sm_90a
//   kEngine  true: one thread issues TMA copies; false: a warp issues cp.async
//   kMinBytes, kMaxBytes  shared memory of the stages: what all these devices have, and the most
//   kMaxCombinedKBlocks  limit of CombineMode::kPerCtaSlice in k blocks; each takes a stage
//   kMaxRotatedGroups    most groups of rows for which the kernel applies RoPE
struct HopperCopies {
  static constexpr bool kHopper = true, kEngine = true;
  static constexpr int kMinBytes = kRingBytes, kMaxBytes = kRingBytes, kMaxCombinedKBlocks = 8;
  // For more than 16 rows a layer was up to 4 us slower than with a separate launch of rotary_kv.
  static constexpr int kMaxRotatedGroups = 2;
};
struct PortableCopies {
  static constexpr bool kHopper = false;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kEngine = true;
#else
  static constexpr bool kEngine = false;
#endif
  static constexpr int kMinBytes = 98 * 1024, kMaxBytes = kRingBytes, kMaxCombinedKBlocks = 4;
  static constexpr int kMaxRotatedGroups = 4;
};
// Lanes of a producer's warp that copy. Each arrives at the barrier of a stage.
template <typename Copies>
constexpr int kCopyLanes = Copies::kEngine ? 1 : 32;

// W in weight blocks of 256 rows x 128 k. The same stage holds 8 kGroups rows of x.
template <typename Copies_, typename Mma, typename T, int kGroups_, typename Unpacker>
struct PackedMainloop {
  using Copies = Copies_;
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowsBytes = 8 * kGroups * kRowBytes;
  static constexpr bool kHas8Bits = Unpacker::kBits == 8;
  static constexpr int kWeightBytes = Unpacker::kBlock + Unpacker::kExtraBytes;
  static constexpr float kScale = Unpacker::template kFactor<T>;  // factor of the sums
  // Weight blocks in flight per SM. Two keep memory busy. With more, SMs share the bandwidth less
  // evenly, and x, partial sums and counters queue behind weights. The limit saves 4 of 56 us a
  // layer at one row. Above 16 rows the consumers are the bottleneck, and more blocks are better.
  // By cp.async a block takes longer, so there are three, unless blocks have 33 KB.
  static constexpr int kLimit = kGroups <= 2                                    ? 2
                                : Copies::kHopper && kGroups == 8 && !kHas8Bits ? 5
                                                                                : 3;
  static constexpr int kInFlight = Copies::kEngine || kHas8Bits ? kLimit : 3;

  static constexpr int kPrefetchBlocks = kGroups == 1 ? prefetch_blocks_of(Unpacker::kBits) : 0;

  // Whether the epilogue frees registers for the main loop. The main loops for few rows and one
  // scale in a block need fewer, and a CTA with fewer registers fits beside attention. On Hopper
  // this is not measured.
  static constexpr bool kClearsSlices =
      !Copies::kHopper && (kGroups > kMaxFlaggedGroups || Unpacker::kScaleSteps < 8);

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
      if constexpr (Copies::kEngine) {
        ptx::mbarrier_expect_bytes(barrier, bytes);
        ptx::bulk_copy(to, from, bytes, barrier, policy);
      } else {
#pragma unroll 4
        for (int byte = threadIdx.x % 32 * 16; byte < bytes; byte += 32 * 16) {
          ptx::cp_async16(to + byte, from + byte);
        }
        ptx::mbarrier_arrive_cp_async(barrier);
      }
    }
  };
  // Fetches the m rows of x.
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const GemmArgs& gemm, int m,
                                                    int k_block, uint32_t barrier) {
    if constexpr (Copies::kEngine) {
      ptx::mbarrier_expect_bytes(barrier, kRowsBytes);
      copy_rows<kGroups>(to, &gemm.x_map, k_block, barrier);
    } else {
      copy_rows_async<kGroups>(to, gemm.x, m, gemm.k, k_block);
      ptx::mbarrier_arrive_cp_async(barrier);
    }
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
  using Copies = HopperCopies;
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kCombinesSlice = false;
  static constexpr int kBlockK = kDenseK, kBoxRows = kPackedRows / 2;
  static constexpr int kRowsBytes = 8 * kGroups * kDenseRowBytes;
  static constexpr int kWeightBytes = kPackedRows * kDenseRowBytes;
  static constexpr float kScale = 1;
  static constexpr int kInFlight = 2, kPrefetchBlocks = 0;
  static constexpr bool kClearsSlices = false;

  LaneRows<kGroups> lane_rows;
  // Offset for ldmatrix of the lane's row in each m16 tile: of its first or second 8 k.
  uint32_t lane_weights[2];

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
    int k;            // first column of both TMA boxes
    int row, second;  // first row of each TMA box

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
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const GemmArgs& gemm, int,
                                                    int k_block, uint32_t barrier) {
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
