// y [M, N] = alpha * x [M, K] W [N, K]^T + beta * y with W in 4 bits (w4a16.h), 1 to 64 rows.
//
// Roofline: W is read once, N K / 2 bytes and 3 % of scales; at 3 TB/s 4096 x 4096 takes 2.9 us and
// 32768 x 4096 takes 23 us. The products hide behind that stream up to M = 32, and at M = 64 take
// as long as it does.
//
// The surprising decision: scales never touch the weights. q - 8 is exact in 16 bits, so the tensor
// cores add up exact integers times x for the 128 k of a group, and one float32 product per sum and
// group applies the scale. That is cheaper than scaling every weight, and no weight is rounded.
//
// Work: a block of threads owns 256 rows of W and a slice of K; each of eight warps multiplies 32
// rows, and one more feeds a ring in shared memory: a packed block (16.9 KB, contiguous) is one
// bulk copy, the rows of x come by a tensor map or, before Hopper, by cp.async. (Eight warps that
// took turns to feed lost 10 % from 16 rows on: while one does, the others of its warpgroup wait.)
// Weights do not depend on earlier kernels, so they are on their way before those end, as many as x
// does not have to wait behind; of up to 16 rows launches overlap for it. Where there are too few
// tiles of 256 rows for the chip, K is cut into slices, which a cluster adds up in order: a block
// sends the sums of 16 rows to the block that owns them, as asynchronous stores that count on a
// barrier there (before compute capability 9.0 and from 12.0 on: through global memory, with a
// second kernel). Slices depend on N and K only and the rows of x are columns of the products, so a
// row of y has the same bits whatever else is in the batch.
#pragma once

#include <atomic>
#include <climits>
#include <type_traits>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/gemm/w4a16_sums.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kMaxStages = 12;
constexpr int kBlockBytes = 17 * 1024;    // room for a block with zero points; keeps x aligned
constexpr int kRowBytes = 2 * kW4BlockK;  // of x in a stage

// 128 k of all rows of x as two panels of 64 k (ptx::swizzled_chunk). By one thread.
template <int kGroups>
__device__ __forceinline__ void copy_rows(uint32_t to, const TensorMap* map, int k_block,
                                          uint32_t barrier) {
  ptx::tensor_copy(to, map, k_block * kW4BlockK, 0, barrier);
  ptx::tensor_copy(to + 8 * kGroups * 128, map, k_block * kW4BlockK + 64, 0, barrier);
}

// Eight q of one word as the A fragment of 16 rows x 16 k, times kUnpackedScale. `low` and `high`
// hold what turns the biased numbers of rows g and g + 8 into q - z, exactly.
template <typename T>
__device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                       uint32_t high);

__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }
__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ __nv_bfloat162 as_bf162(uint32_t v) {
  return *reinterpret_cast<__nv_bfloat162*>(&v);
}
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 v) {
  return *reinterpret_cast<uint32_t*>(&v);
}

// float16: 0x6400 | b is 1024 + b, of all eight bits of a byte: r + 16 s, of rows g and g + 8. With
// s alone, and zero points z of r and y of s, 1024 + r + 16 s - (1024 + 16 s + z) is r - z, and a
// sixteenth of the second number less 64 + z / 16 + y is s - y, all exactly.
template <>
__device__ __forceinline__ void unpack<__half>(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                               uint32_t high) {
  const __half2 sixteenth = __float2half2_rn(1.0f / 16);
  const auto split = [&](uint32_t& of_low, uint32_t& of_high, uint32_t both) {
    const __half2 top = as_half2(ptx::masked_or(both, 0x00F000F0, low));
    of_low = bits_of(__hsub2(as_half2(both), top));
    of_high = bits_of(__hfma2(top, sixteenth, as_half2(high)));
  };
  split(a[0], a[1], ptx::masked_or(word, 0x00FF00FF, 0x64006400));
  split(a[2], a[3], __byte_perm(word, 0x64006400, 0x5351));
}
// bfloat16: 0x4300 | q is 128 + q. 16 q has no room beside it, but alone it is a number too: q
// 2^-129, because numbers go on evenly below the smallest normal one.
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(uint32_t (&a)[4], uint32_t word, uint32_t low,
                                                      uint32_t high) {
  const auto multiply = [](uint32_t v, uint32_t by, uint32_t plus) {
    return bits_of(__hfma2(as_bf162(v), as_bf162(by), as_bf162(plus)));
  };
  constexpr uint32_t kQuarter = 0x3E803E80, kTwoTo127 = 0x7F007F00;
  const uint32_t next = word >> 8;
  a[0] = multiply(ptx::masked_or(word, 0x000F000F, 0x43004300), kQuarter, low);
  a[1] = multiply(word & 0x00F000F0, kTwoTo127, high);
  a[2] = multiply(ptx::masked_or(next, 0x000F000F, 0x43004300), kQuarter, low);
  a[3] = multiply(next & 0x00F000F0, kTwoTo127, high);
}
// Unpacked numbers are this times q - z.
template <typename T>
constexpr float kUnpackedScale = std::is_same_v<T, __half> ? 1 : 0.25f;

template <typename T>
__device__ __forceinline__ uint32_t low_offset(int zero) {
  if constexpr (std::is_same_v<T, __half>) return 0x64006400 | zero | zero << 16;
  return pack2<T>(-0.25f * (128 + zero), -0.25f * (128 + zero));
}
// `low_zero`: of the row 8 before.
template <typename T>
__device__ __forceinline__ uint32_t high_offset(int zero, int low_zero) {
  const float offset = std::is_same_v<T, __half> ? -(64 + zero + low_zero / 16.0f) : -0.25f * zero;
  return pack2<T>(offset, offset);
}

__device__ __forceinline__ float load_scale(uint32_t shared, bool bf16) {
  const uint16_t bits = ptx::load_shared_half(shared);
  return bf16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
}

// How a warp multiplies a packed block in shared memory by the rows of x beside it.
struct MmaSync {
  static constexpr bool kTensorMap = false;
  static constexpr int kTiles = 2;  // of 16 rows, at a time

  template <int kGroups>
  using LaneRows = cuda::LaneRows<kGroups>;

  template <typename T, int kGroups, typename F>
  static __device__ __forceinline__ void multiply(float (&part)[2][kGroups][4], int,
                                                  uint32_t weights, uint32_t rows,
                                                  const LaneRows<kGroups>& lane_rows,
                                                  const uint32_t (&low)[2],
                                                  const uint32_t (&high)[2], F meanwhile) {
    // Words and rows of x of two steps of 16 k, loaded while the steps before are multiplied.
    uint4 words[2];
    uint32_t b[2][2][kGroups][2];
    const auto fetch = [&](int pair) {
      words[pair % 2] = ptx::load_shared16(weights + pair * kPairBytes);
      auto& to = b[pair % 2];
      if constexpr (kGroups == 1) {
        uint32_t r[4];
        ptx::ldmatrix4(r, rows + lane_rows.at(pair * 4));
        to[0][0][0] = r[0], to[0][0][1] = r[1], to[1][0][0] = r[2], to[1][0][1] = r[3];
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int group = 0; group < kGroups; group += 2) {
            uint32_t r[4];
            ptx::ldmatrix4(r, rows + lane_rows.at(pair * 4 + step * 2) + group * 8 * 128);
            to[step][group][0] = r[0], to[step][group][1] = r[1];
            to[step][group + 1][0] = r[2], to[step][group + 1][1] = r[3];
          }
        }
      }
    };
    fetch(0);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) part[t][group][i] = 0;
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair < 3) fetch(pair + 1);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          uint32_t a[4];
          unpack<T>(a, word_of(words[pair % 2], step, t), low[t], high[t]);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const auto& x = b[pair % 2][step][group];
            ptx::mma_16x8x16<T>(part[t][group], a, x[0], x[1]);
          }
        }
      }
    }
    meanwhile();
  }
};

// Where a lane finds what it reads of a packed block: 16 bytes of q, and the scale of the first of
// its four rows, 8 apart.
struct LaneWeights {
  uint32_t words = threadIdx.x / 32 * kSlabBytes + threadIdx.x % 32 * 16;
  uint32_t scale = kScaleOffset + 2 * (threadIdx.x / 32 * kSlabRows + threadIdx.x % 32 / 4);

  __device__ __forceinline__ LaneWeights() {
    ptx::opaque(words);  // or they are computed again for every block
    ptx::opaque(scale);
  }
  __device__ __forceinline__ uint32_t zero() const {
    return kZeroOffset + (scale - kScaleOffset) / 2;
  }
};

// sums += the rows of x times the 32 rows of a packed block that are this warp's, both in shared
// memory. Calls `ask` when the last products are under way; each lane calls `release` when it has
// read its part.
template <typename Mma, typename T, int kGroups, bool kZeros, typename F, typename G>
__device__ __forceinline__ void add_block(float (&sums)[2][kGroups][4], uint32_t rows,
                                          uint32_t block,
                                          const typename Mma::template LaneRows<kGroups>& lane_rows,
                                          const LaneWeights& lane, bool bf16_scales, F ask,
                                          G release) {
  float scale[2][2];
  uint32_t low[2] = {low_offset<T>(8), low_offset<T>(8)};
  uint32_t high[2] = {high_offset<T>(8, 8), high_offset<T>(8, 8)};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[t][half] = load_scale(block + lane.scale + 2 * (t * 16 + half * 8), bf16_scales);
    }
    if constexpr (kZeros) {
      const uint32_t zeros = block + lane.zero() + t * 16;
      const int low_zero = ptx::load_shared_byte(zeros);
      low[t] = low_offset<T>(low_zero);
      high[t] = high_offset<T>(ptx::load_shared_byte(zeros + 8), low_zero);
    }
  }

#pragma unroll
  for (int first = 0; first < 2; first += Mma::kTiles) {
    float part[Mma::kTiles][kGroups][4];
    const bool is_last = first + Mma::kTiles == 2;
    Mma::template multiply<T, kGroups>(part, first, block + lane.words, rows, lane_rows, low, high,
                                       [&] {
                                         if (is_last) ask();
                                       });
    if (is_last) release();
#pragma unroll
    for (int t = 0; t < Mma::kTiles; ++t) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[first + t][group][i];
          sum = __fmaf_rn(scale[first + t][i / 2], part[t][group][i], sum);
        }
      }
    }
  }
}

// ---- kernels

// Stages in shared memory, of rows of x and a packed block behind them, and the barriers that say
// that both are there, or that all warps are done with them.
template <int kGroups>
struct W4Ring {
  static constexpr int kXBytes = 8 * kGroups * kRowBytes, kStageBytes = kXBytes + kBlockBytes;
  static constexpr int kBarriers = 2 * kMaxStages;
  uint32_t data, barriers;
  uint32_t end;  // of the barriers of the stages that there are

  __device__ __forceinline__ W4Ring(const void* data, const void* barriers, int stages)
      : data(ptx::shared_address(data)), barriers(ptx::shared_address(barriers)) {
    end = this->barriers + 8 * stages;
    ptx::opaque(this->data);  // computed once
    ptx::opaque(this->barriers);
    ptx::opaque(end);
  }

  // Where a stage and its barriers lie, and the parity of their phase.
  struct Stage {
    uint32_t rows, full;
    int parity;

    __device__ __forceinline__ uint32_t weights() const { return rows + kXBytes; }
    __device__ __forceinline__ uint32_t empty() const { return full + 8 * kMaxStages; }
  };
  __device__ __forceinline__ Stage stage(int index) const {
    return {data + index * kStageBytes, barriers + 8 * index, 0};
  }
  __device__ __forceinline__ void advance(Stage& at) const {
    at.rows += kStageBytes;
    at.full += 8;
    if (at.full == end) at = {data, barriers, at.parity ^ 1};
  }
};

// How many blocks a block of threads has still to ask for when those of the next launch may begin.
// Earlier those are in the way of these; later memory rests.
template <int kGroups>
constexpr int kLeftToAskFor = kGroups == 1 ? 3 : 0;

// Feeds the ring, by one warp: weights as soon as there is room, rows of x when the kernels before
// are done, and no more weights than `asked` before that, behind which rows would wait. Those that
// follow are brought to L2. `first_block` and the following are of each tile.
template <typename Mma, int kGroups>
__device__ __forceinline__ void feed(const Args& args, const W4Ring<kGroups>& ring, int first_tile,
                                     int tile_step, int first_block, int blocks_of_tile) {
  const int lane = threadIdx.x % 32, end = first_block + blocks_of_tile;
  const int num_tiles = args.rounds - (first_tile + (args.rounds - 1) * tile_step >= args.tiles);
  const int num_iterations = num_tiles * blocks_of_tile;
  const uint64_t policy = ptx::evict_first_policy();
  int left = num_iterations;  // blocks to ask for
  if (left <= kLeftToAskFor<kGroups>) ptx::pdl_launch();
  int tile = first_tile, weights_block = first_block, rows_block = first_block;  // what comes next

  using Stage = typename W4Ring<kGroups>::Stage;
  const auto next_weights = [&] {
    return args.blocks + (int64_t{tile} * args.k_blocks + weights_block) * args.block_bytes;
  };
  const auto feed_weights = [&](const Stage& stage) {
    const uint32_t full = stage.full, to = stage.weights();
    const char* from = next_weights();
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      ptx::mbarrier_expect_bytes(full, args.block_bytes + (Mma::kTensorMap ? ring.kXBytes : 0));
      ptx::bulk_copy(to, from, args.block_bytes, full, policy);
    }
#else
    for (int byte = lane * 16; byte < args.block_bytes; byte += 32 * 16) {
      ptx::cp_async16(to + byte, from + byte);
    }
    if (lane == 0) ptx::mbarrier_arrive(full);
#endif
    if (++weights_block == end) weights_block = first_block, tile += tile_step;
    if (--left == kLeftToAskFor<kGroups>) ptx::pdl_launch();
  };
  const auto feed_rows = [&](const Stage& stage) {
    const uint32_t full = stage.full, to = stage.rows;
    int k_block = rows_block;
    if (k_block >= args.blocks_of_digit) k_block -= args.blocks_of_digit;
    if constexpr (Mma::kTensorMap) {
      if (lane == 0) copy_rows<kGroups>(to, &args.x_map, k_block, full);
    } else {
      const int chunk = lane % 16, k = k_block * kW4BlockK + chunk * 8;
      const char* from = static_cast<const char*>(args.x) + int64_t{k} * 2;
#pragma unroll 4
      for (int row = lane / 16; row < args.m; row += 2) {
        ptx::cp_async16(to + ptx::swizzled_chunk<8 * kGroups>(row, chunk),
                        from + int64_t{row} * args.k * 2, k < args.k);
      }
      ptx::mbarrier_arrive_cp_async(full);
    }
    if (++rows_block == end) rows_block = first_block;
  };

  if constexpr (Mma::kTensorMap) ptx::prefetch_map(&args.x_map);
  const int first = min(args.stages, num_iterations), asked = min(args.asked, first);
#pragma unroll 1
  for (int i = 0; i < asked; ++i) feed_weights(ring.stage(i));
  const char* ahead = next_weights();
  const int ahead_bytes = left == 0 ? 0 : min(args.ahead, end - weights_block) * args.block_bytes;
#pragma unroll 1
  for (int byte = lane * 128; byte < ahead_bytes; byte += 32 * 128) ptx::prefetch_l2(ahead + byte);
  ptx::pdl_wait();
#pragma unroll 1
  for (int i = 0; i < first; ++i) {
    if (i >= asked) feed_weights(ring.stage(i));
    feed_rows(ring.stage(i));
  }
  Stage stage = ring.stage(0);
#pragma unroll 1
  for (int i = first; i < num_iterations; ++i) {
    ptx::mbarrier_wait(stage.empty(), stage.parity);
    feed_weights(stage);
    feed_rows(stage);
    ring.advance(stage);
  }
  if constexpr (!Mma::kTensorMap) {  // nothing is on its way when the warp ends
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
}

// Sums of 64 rows want more registers than an equal share.
template <typename Mma, int kGroups>
constexpr bool kMovesRegisters = Mma::kTensorMap && kGroups == 8;
template <typename Mma, int kGroups>
constexpr int kAllThreads = kThreads + (kMovesRegisters<Mma, kGroups> ? 128 : 32);

// Launches of up to 16 rows that cut K into slices overlap: while the blocks of one multiply what
// is left and add up their slices, those of the next fill their rings. So a multiprocessor has room
// for two blocks, but never for two of one launch, for which all others would wait: launches take
// turns to have more than half of the shared memory, or of the registers, by warps that do nothing
// (up to kMaxThreads, enough from 49 registers a thread on). Sums of more rows leave no registers
// for another block.
template <int kGroups>
constexpr bool kOverlaps = kGroups <= 2;
constexpr int kMoreShared = 116 * 1024, kLessShared = 108 * 1024;  // both fit into 228 KB
template <typename Mma, int kGroups>
constexpr int kMaxThreads = kOverlaps<kGroups> ? 640 : kAllThreads<Mma, kGroups>;

template <typename Mma, typename T,  // __half or __nv_bfloat16
          int kGroups,               // groups of 8 rows of x: M <= 8 * kGroups
          bool kZeros>               // W has zero points
__global__ void __launch_bounds__(kMaxThreads<Mma, kGroups>, 1)
    w4_gemm_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  using Ring = W4Ring<kGroups>;
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers + 1];
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  const Ring ring(shared, barriers, args.stages);
  const int slice = blockIdx.x;
#ifdef CPMCU_W4_CLUSTERS
  const Inbox<T, kGroups> inbox{ring.stage(args.stages).rows, ring.barriers + 8 * Ring::kBarriers,
                                slice, lane};
#endif
  const int first_tile = blockIdx.y, tile_step = gridDim.y;
  const int first_block = slice * args.slice_blocks + min(slice, args.longer_slices);
  const int blocks_of_tile = args.slice_blocks + (slice < args.longer_slices);

  const auto init = [&](int i) {
    // One arrival announces the bytes of bulk copies, the others are lanes that copy rows.
    const auto mine = ring.stage(i);
    ptx::mbarrier_init(mine.full, Mma::kTensorMap ? 1 : 33);
    ptx::mbarrier_init(mine.empty(), kWarps * kArrivals<kGroups>);
  };
  // Each barrier takes a warp 30 to 40 cycles, so all warps share them. Not of up to 8 rows, whose
  // blocks begin early enough: the sooner they ask, the more they are in the way of the launch
  // before.
  if constexpr (kGroups == 1) {
    if (threadIdx.x < args.stages) {
      init(threadIdx.x);
      ptx::mbarrier_init_fence();
    }
  } else if (ptx::is_elected()) {
#pragma unroll 1
    for (int i = warp; i < args.stages; i += blockDim.x / 32) init(i);
    ptx::mbarrier_init_fence();
  }
#ifdef CPMCU_W4_CLUSTERS
  if (args.slices > 1 && threadIdx.x == kThreads - 1) inbox.open(args);
#endif
  __syncthreads();
#ifdef CPMCU_W4_CLUSTERS
  if (args.slices > 1) ptx::cluster_arrive();
#endif

  if (warp >= kWarps) {
    if constexpr (kMovesRegisters<Mma, kGroups>) ptx::give_registers<kFeedingRegisters>();
    if (warp == kWarps) {
      feed<Mma>(args, ring, first_tile, tile_step, first_block, blocks_of_tile);
    } else {
      ptx::pdl_wait();
    }
#ifdef CPMCU_W4_CLUSTERS
    if (args.slices > 1) ptx::cluster_wait();
#endif
    return;
  }
  if constexpr (kMovesRegisters<Mma, kGroups>) ptx::take_registers<kMultiplyingRegisters>();
  ptx::pdl_wait();

  const typename Mma::template LaneRows<kGroups> lane_rows;
  const LaneWeights lane_weights;
  auto stage = ring.stage(0);
  for (int tile = first_tile; tile < args.tiles; tile += tile_step) {
    float sums[2][kGroups][4] = {};
    ptx::mbarrier_wait(stage.full, stage.parity);
    for (int left = blocks_of_tile;;) {
      const auto current = stage;
      ring.advance(stage);
      bool is_full;
      const auto ask = [&] {
        is_full = ptx::mbarrier_try_wait(stage.full, stage.parity, left > 1);
      };
      const auto release = [&] { arrive<kGroups>(current.empty()); };
      add_block<Mma, T, kGroups, kZeros>(sums, current.rows, current.weights(), lane_rows,
                                         lane_weights, args.bf16_scales, ask, release);
      if (--left == 0) break;
      ptx::mbarrier_wait(stage.full, stage.parity, is_full);
    }

    const int n0 = tile * kW4BlockRows;
    if (args.slices == 1) {
      store_sums<T>(args, sums, n0);
      continue;
    }
#ifdef CPMCU_W4_CLUSTERS
    inbox.add_up(args, sums, warp, n0);
#else
    store_partials(args, sums, slice, n0 + warp * 32 + lane / 4);
#endif
  }
}

// Adds up the slices where there are no clusters.
template <typename T>
__global__ void __launch_bounds__(256) w4_add_slices_kernel(const __grid_constant__ Args args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  const int n = i / 8 * 16 + i % 8;
  if (n >= args.n) return;
  float sum = 0, sum_8 = 0;
  for (int slice = 0; slice < args.slices; ++slice) {
    const float* from = args.partials + (int64_t{slice} * args.m + row) * args.n + n;
    sum += from[0];
    if (n + 8 < args.n) sum_8 += from[8];
  }
  store_pair<T>(args, row, n, sum, sum_8);
}

// ---- launchers

// Whose turn it is to have more registers.
bool takes_registers() {
  static std::atomic<uint32_t> num_launches{0};
  return num_launches++ % 2 == 1;
}

// How many threads make a block take more than half of a multiprocessor's registers and leave
// enough for one of `threads`; if none do, more than a block may have.
template <typename Kernel>
int threads_of_most_registers(Kernel kernel, int threads) {
  constexpr int kRegisters = 64 * 1024;
  cudaFuncAttributes of{};
  CHECK_CUDA(cudaFuncGetAttributes(&of, kernel));
  const int of_warp = (of.numRegs + 7) / 8 * 8 * 32;
  const int warps = kRegisters / 2 / of_warp + 1;
  return (warps + threads / 32) * of_warp <= kRegisters ? 32 * warps : INT_MAX;
}

template <typename Mma, typename T, int kGroups, bool kZeros>
void launch_w4_kernel(const Context& ctx, Args args) {
  constexpr int kStageBytes = W4Ring<kGroups>::kStageBytes;
  const auto kernel = w4_gemm_kernel<Mma, T, kGroups, kZeros>;
  const bool clusters = has_clusters(ctx.code_capability);
  args.alpha /= kUnpackedScale<T>;
  args.slice_blocks = args.k_blocks / args.slices;
  args.longer_slices = args.k_blocks % args.slices;
  for (int i = 0; i <= args.slices; ++i) {
    args.first_part[i] = static_cast<uint8_t>((kParts * i + args.slices - 1) / args.slices);
  }
  const bool sends = clusters && args.slices > 1;
  const int parts = (kParts + args.slices - 1) / args.slices;  // at most
  const int inbox_bytes = sends ? args.slices * parts * kGroups * kGroupBytes : 0;
  // One block takes nearly all of a multiprocessor's shared memory; GeForce cards have 99 KB for
  // one.
  int threads = kAllThreads<Mma, kGroups>, shared_bytes = clusters ? kRingBytes : 98 * 1024;
  allow_shared_bytes(kernel, shared_bytes);
  if constexpr (kOverlaps<kGroups>) {
    static const int more_threads = threads_of_most_registers(kernel, threads);
    if (sends && more_threads <= kMaxThreads<Mma, kGroups>) {
      const bool more = takes_registers();
      if (more) threads = more_threads;
      shared_bytes = more ? kLessShared : kMoreShared;
    }
  }
  args.stages = std::min(kMaxStages, (shared_bytes - inbox_bytes) / kStageBytes);
  // The more rows, the longer x takes and the less should be in front of it. Where K is not cut
  // there is more to read than to wait for, up to 32 rows.
  args.asked = args.stages;
  args.ahead = 0;
  if (sends) {
    if (kGroups > 1) args.asked = kGroups == 2 ? 3 : 1;
    args.ahead = kGroups == 2 ? 2 : 1;
  } else if (clusters && kGroups == 8) {
    args.asked = 2;
  }
  args.rounds = args.slices > 1 ? 1 : (args.tiles + ctx.sm_count - 1) / ctx.sm_count;
  const int tile_blocks = (args.tiles + args.rounds - 1) / args.rounds;
  launch_cluster(ctx, clusters ? args.slices : 1, kernel, dim3(args.slices, tile_blocks),
                 dim3(threads), shared_bytes, args);
  if (args.slices > 1 && !clusters) {
    launch(ctx, w4_add_slices_kernel<T>, dim3((args.n / 2 + 8 + 255) / 256, args.m), dim3(256), 0,
           args);
  }
}

template <typename Mma, typename T, int kGroups>
void launch_w4(const Context& ctx, const Args& args) {
  const bool zeros = args.block_bytes > kZeroOffset;
  zeros ? launch_w4_kernel<Mma, T, kGroups, true>(ctx, args)
        : launch_w4_kernel<Mma, T, kGroups, false>(ctx, args);
}

// MmaOf<kGroups>: how the kernel with room for so many groups of 8 rows multiplies.
template <template <int> typename MmaOf>
void launch_w4_rows(const Context& ctx, DType dtype, const Args& args) {
  dispatch_half(dtype, [&](auto t) {
    dispatch_int<1, 2, 4, 8>("groups of rows", row_groups(args.m), [&](auto groups) {
      constexpr int kGroups = decltype(groups)::value;
      launch_w4<MmaOf<kGroups>, decltype(t), kGroups>(ctx, args);
    });
  });
}

}  // namespace
}  // namespace cpmcu::cuda
