// Epilogue of packed_gemm: adds the slices of K and writes y.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/packed/block.cuh"
#include "kernels/gemm/x_rows.cuh"
#include "kernels/layer/silu.cuh"

namespace cpmcu::cuda {

// The arguments of all kernels of packed_gemm.
struct PackedGemmArgs {
  TensorMap x_map;     // read only if Mma::kTensorMap
  void* y;             // [M, N], T or float32; gated: [M, N / 2]
  const void* x;       // [M, K]
  const char* blocks;  // [tiles][k_blocks]
  float* partials;     // sums of each slice; null if clusters add the slices
  int m, n, k;
  int tiles;           // tiles of 256 rows
  int rounds;          // number of tiles of a CTA; some CTAs have one less
  int k_blocks;        // number of k blocks of 128, of all planes
  int plane_k_blocks;  // number of k blocks of a plane; x starts again after each plane
  int block_bytes;
  int slices;
  int slice_blocks, longer_slices;  // k blocks of a slice; number of slices that have one more
  uint8_t first_m16_tile[9];        // explained at SliceReceiver
  int stages;
  // Weight blocks requested before x arrives: to stages, and further ones to L2.
  int early_stages, early_l2_blocks;
  uint8_t scale_form;
  bool float_out, gated;
  float alpha, beta;
};

namespace {

constexpr int kM16Tiles = 2 * kWarps;  // m16 tiles of a weight block
// Bytes of the sums of an m16 tile and 8 rows of x: 16 bytes a lane.
constexpr int kGroupBytes = 32 * 16;

// Whether code of this compute capability adds slices in clusters. The stages and the DSMEM receive
// buffer need more shared memory than the 99 KB of a CTA on GeForce cards, also from 12.0 on.
constexpr bool has_clusters(int capability) { return capability >= 90 && capability < 120; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define CPMCU_SLICE_CLUSTERS
#endif

// Arrivals of a consumer warp at a barrier: one in all, or one for each lane. One for each lane
// makes small matrices 2 % faster at 32 and 64 rows, and up to 6 % slower at fewer. NOTE: with one
// in all, racecheck reports accesses before the arrival that it cannot order.
template <int kGroups>
constexpr int kArrivals = kGroups <= 2 ? 1 : 32;
template <int kGroups>
__device__ __forceinline__ void arrive(uint32_t barrier) {
  if constexpr (kArrivals<kGroups> == 1) __syncwarp();
  if (kArrivals<kGroups> > 1 || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// ---- epilogue
//
// NOTE: an epilogue runs once a launch, and its time is that of fetching its instructions. At 32
// rows a general epilogue takes 3 us more than one specialised for the type of y. So the type is
// tested once, outside the loops.

// alpha * value + beta * old; args.alpha includes 1 / kFactor.
__device__ __forceinline__ float updated(const PackedGemmArgs& args, float value, float old) {
  value = __fmul_rn(args.alpha, value);
  return args.beta == 0 ? value : __fmaf_rn(args.beta, old, value);
}
__device__ __forceinline__ float gated_value(const PackedGemmArgs& args, float gate, float up) {
  gate = __fmul_rn(args.alpha, gate);
  return silu(gate) * __fmul_rn(args.alpha, up);
}

// Stores one output: of a gated W from its rows n and n + 8, else from row n alone. Rows are in the
// order of the weight blocks.
template <typename T>
__device__ __forceinline__ void store_value(const PackedGemmArgs& args, int row, int n, float sum,
                                            float sum_8) {
  if (row >= args.m || n >= args.n) return;
  int64_t at = int64_t{row} * args.n + n;
  float value = sum;
  if (args.gated) {
    at = int64_t{row} * (args.n / 2) + n / 16 * 8 + n % 8;
    value = gated_value(args, sum, sum_8);
  }
  if (args.float_out) {
    float* y = static_cast<float*>(args.y) + at;
    *y = args.gated ? value : updated(args, value, args.beta == 0 ? 0 : *y);
  } else {
    T* y = static_cast<T*>(args.y) + at;
    value = args.gated ? value : updated(args, value, args.beta == 0 ? 0 : to_float(*y));
    *y = from_float<T>(value);
  }
}
template <typename T>
__device__ __forceinline__ void store_pair(const PackedGemmArgs& args, int row, int n, float sum,
                                           float sum_8) {
  store_value<T>(args, row, n, sum, sum_8);
  if (!args.gated) store_value<T>(args, row, n + 8, sum_8, 0);
}

// Stores a lane's sums of a whole tile: rows 8 group + 2q, + 1 of x, and rows n, n + 8, n + 16,
// n + 24 of W in the order of the weight blocks.
template <typename Y, bool kGated, int kGroups>
__device__ __forceinline__ void store_whole(const PackedGemmArgs& args,
                                            const float (&sums)[2][kGroups][4], int n) {
  const int columns = kGated ? args.n / 2 : args.n;
  const int q2 = threadIdx.x % 4 * 2;
  Y* y = static_cast<Y*>(args.y) + int64_t{q2} * columns + (kGated ? n / 16 * 8 + n % 8 : n);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (group * 8 + q2 + i < args.m) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const float sum = sums[t][group][i], sum_8 = sums[t][group][i + 2];
          if constexpr (kGated) {
            y[t * 8] = from_float<Y>(gated_value(args, sum, sum_8));
          } else {
            y[t * 16] = from_float<Y>(__fmul_rn(args.alpha, sum));
            y[t * 16 + 8] = from_float<Y>(__fmul_rn(args.alpha, sum_8));
          }
        }
      }
      y += (i == 0 ? 1 : 7) * static_cast<int64_t>(columns);
    }
  }
}
// Calls f(row of x, stored row n of W, sum of n, sum of n + 8) for the lane's sums. The argument
// `n` is the lane's first stored row.
template <int kGroups, typename F>
__device__ __forceinline__ void each_pair(const float (&sums)[2][kGroups][4], int n, F f) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) {
    const int t = i % 2, group = i / 4, odd = i / 2 % 2;
    f(group * 8 + threadIdx.x % 4 * 2 + odd, n + 16 * t, sums[t][group][odd],
      sums[t][group][odd + 2]);
  }
}
template <typename T, int kGroups>
__device__ __forceinline__ void store_sums(const PackedGemmArgs& args,
                                           const float (&sums)[2][kGroups][4], int n0) {
  const int n = n0 + static_cast<int>(threadIdx.x) / 32 * 32 + threadIdx.x % 32 / 4;
  if (n0 + kPackedRows <= args.n && args.beta == 0 && !args.float_out) {
    args.gated ? store_whole<T, true>(args, sums, n) : store_whole<T, false>(args, sums, n);
  } else if (n0 + kPackedRows <= args.n && args.beta == 0 && !args.gated) {
    store_whole<float, false>(args, sums, n);
  } else {
    each_pair(sums, n, [&](int row, int at, float sum, float sum_8) {
      store_pair<T>(args, row, at, sum, sum_8);
    });
  }
}

// ---- slices

#ifdef CPMCU_SLICE_CLUSTERS
// The DSMEM receive buffer of a CTA of a cluster, behind its stages: [slices][m16
// tiles][kGroups][lanes] of 16 bytes. CTA r of the cluster multiplies slice r and adds m16 tiles
// [first_m16_tile[r], first_m16_tile[r + 1]). With slices, a CTA has one tile of 256 rows.
template <typename T, int kGroups>
struct SliceReceiver {
  // Fragments of an m16 tile. A fragment has a lane's sums of a row group.
  static constexpr int kFragments = kGroups * 32;
  uint32_t fragments, received;
  int slice, lane;  // slice of this CTA; lane of this thread

  // By one thread.
  __device__ __forceinline__ void open(const PackedGemmArgs& args) const {
    const int m16_tiles = args.first_m16_tile[slice + 1] - args.first_m16_tile[slice];
    // Arrivals: this thread, and this CTA's own sums.
    ptx::mbarrier_init(received, 1 + kArrivals<kGroups> * m16_tiles);
    ptx::mbarrier_expect_bytes(received,
                               (args.slices - 1) * m16_tiles * 8 * ((args.m + 1) / 2) * 16);
    ptx::mbarrier_init_fence();
  }

  // Sends a consumer warp's sums to their owners, adds the received ones and writes y.
  __device__ __forceinline__ void add_up(const PackedGemmArgs& args,
                                         const float (&sums)[2][kGroups][4], int warp,
                                         int n0) const {
    const int g = lane / 4, q = lane % 4;
    const int my_first = args.first_m16_tile[slice];
    const int my_tiles = args.first_m16_tile[slice + 1] - my_first;
    ptx::cluster_wait();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int m16_tile = warp * 2 + t, owner = m16_tile * args.slices / kM16Tiles;
      const int its_first = args.first_m16_tile[owner];
      const int its_tiles = args.first_m16_tile[owner + 1] - its_first;
      const uint32_t box =
          fragments + ((slice * its_tiles + m16_tile - its_first) * kFragments + lane) * 16;
      const auto each_group = [&](auto store) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (group * 8 + q * 2 < args.m) store(group * kGroupBytes, sums[t][group]);
        }
      };
      if (owner == slice) {
        each_group([&](int at, const auto& sum) { ptx::store_shared16(box + at, sum); });
        arrive<kGroups>(received);
      } else {
        const uint32_t remote_box = ptx::cluster_address(box, owner);
        const uint32_t sent = ptx::cluster_address(received, owner);
        each_group(
            [&](int at, const auto& sum) { ptx::store_cluster16(remote_box + at, sum, sent); });
      }
    }
#pragma unroll 1
    for (int fragment = threadIdx.x; fragment < my_tiles * kFragments; fragment += kThreads) {
      const int row = fragment / 32 % kGroups * 8 + q * 2;
      const int n = n0 + (my_first + fragment / kFragments) * 16 + g;
      T* const y = static_cast<T*>(args.y) + int64_t{row} * args.n + n;
      const bool whole = n0 + kPackedRows <= args.n && !args.float_out && !args.gated;
      float old[4] = {};  // loaded while sums are in flight
      if (whole && args.beta != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row + i % 2 < args.m) old[i] = to_float(y[i % 2 * args.n + i / 2 * 8]);
        }
      }
      ptx::mbarrier_wait(received, 0);
      if (row >= args.m) continue;
      float sum[4] = {};
      for (int from = 0; from < args.slices; ++from) {
        const uint4 v =
            ptx::load_shared16(fragments + (from * my_tiles * kFragments + fragment) * 16);
        sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
        sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
      }
      if (whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row + i % 2 < args.m) {
            y[i % 2 * args.n + i / 2 * 8] = from_float<T>(updated(args, sum[i], old[i]));
          }
        }
      } else {
        store_pair<T>(args, row, n, sum[0], sum[2]);
        store_pair<T>(args, row + 1, n, sum[1], sum[3]);
      }
    }
    ptx::mbarrier_wait(received, 0);  // until then, other CTAs write to this CTA's memory
  }
};
#else
// Stores partial sums for packed_add_slices_kernel; `n` is the lane's first stored row of W.
template <int kGroups>
__device__ __forceinline__ void store_partials(const PackedGemmArgs& args,
                                               const float (&sums)[2][kGroups][4], int slice,
                                               int n) {
  each_pair(sums, n, [&](int row, int at, float sum, float sum_8) {
    if (row >= args.m) return;
    float* to = args.partials + (int64_t{slice} * args.m + row) * args.n + at;
    if (at < args.n) to[0] = sum;
    if (at + 8 < args.n) to[8] = sum_8;
  });
}
#endif

}  // namespace
}  // namespace cpmcu::cuda
