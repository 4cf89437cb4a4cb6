// A run of dependent products as one kernel (gemm_chain.h), for Hopper, 1 to 64 rows.
//
// Roofline: all W of the run are read once, at 3 TB/s 41 us in 4 bits and 155 us in 16 bits for a
// layer of MiniCPM4-8B. Launched one by one 4-bit products take 63 us at one row, because memory
// rests while a launch ends, the next begins and its x arrives.
//
// The surprising decision: no launch, but a barrier of the whole grid between two products. It
// costs as much as a launch does; yet a warp that has nothing to do with it goes on fetching, and
// when x is there the ring in shared memory is full of weights that were read meanwhile.
//
// Work: one block of threads on each multiprocessor, all alive until the end. Eight warps multiply,
// 4 bits as in w4a16_kernel.cuh and 16 bits as they are, one thread feeds weights and another rows
// of x. A product has tiles of 256 rows of W, and slices of K where tiles are few, so that every
// block has something. Sums of slices go through global memory: pieces of 16 bytes in a place that
// holds NaNs of a kind that no instruction makes, so that a piece says itself whether it has come,
// and nobody counts or fences. The receiver puts the NaNs back. A block adds up the slices of its
// rows in order, so a row has the same bits whatever else is in the batch.
//
// Norms: the block that finishes a row of y also writes y times the weights of the norm, and adds
// its squares to a sum in integers, whose order does not matter. The next product multiplies what
// was written and divides its own sums by the root of the mean square, once a row.
//
// Attention, whose partial results wait to be combined: of one row each block combines what its
// slice of the first product reads, of more all blocks together, with a barrier behind it.
//
// Rotary, of one row: who adds up the last product does so for both elements that RoPE turns
// against each other, bias and all, and writes keys and values to the cache.
//
// Little code: but for the multiplying loop everything runs once or a few times in a launch, and
// a warp gets instructions that it did not run lately at about four cycles each. What can be known
// before x comes is looked up and computed before it comes.
#include "kernels/gemm/gemm_chain.h"

#include "core/trace.cuh"
#include "kernels/attention/combine.cuh"
#include "kernels/gemm/w4a16_wgmma.cuh"
#include "kernels/rotary.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("chain");

constexpr int kRingBytes = 226 * 1024;    // of the 227 KB that a block may have
constexpr uint32_t kNotYet = 0xFFFFFFFF;  // NaN; instructions make 0x7FFFFFFF
constexpr int kStateBytes = 128 * 1024;

// A sum that does not depend on the order of its terms: in units of 2^-8, and what is left of a
// term then in units of 2^-48. Up to 2^56, which is far beyond what a norm is asked for.
struct alignas(128) ExactSum {  // a cache line, or additions to neighbours wait for each other
  unsigned long long high, low;

  __device__ __forceinline__ void add(float term) {
    const float whole = floorf(term * 0x1p8f);
    atomicAdd(&high, static_cast<unsigned long long>(whole));
    atomicAdd(&low, static_cast<unsigned long long>(__fmaf_rn(whole, -0x1p-8f, term) * 0x1p48f));
  }
  __device__ __forceinline__ float value() const {
    return static_cast<float>(high) * 0x1p-8f + static_cast<float>(low) * 0x1p-48f;
  }
};

// What launches leave to the next one. Zero at first.
struct ChainState {
  // Of blocks that are done with what link i reads; a cache line each. Ever growing.
  uint32_t arrived[kMaxChainLinks][32];
  uint32_t bases[kMaxChainLinks];  // `arrived` before this launch
  uint32_t launches;
  ExactSum squares[2][kMaxChainLinks][kMaxRows];  // by turns: one half is used, the other zeroed
};
static_assert(sizeof(ChainState) <= kStateBytes);

struct alignas(64) Link {
  TensorMap x_map, w_map;   // of W if it has 16 bits
  const char* blocks;       // [tiles][k_blocks] if it has 4
  void* y;                  // [M, N]; gated: [M, N / 2]
  void* normed;             // [M, N]; null: no norm
  const void* norm_weight;  // [N]
  float alpha, beta;
  float inv_size, eps;     // of the norm that x is owed; inv_size 0: none
  int n, tiles, k_blocks;  // tiles of 256 rows; a block has as many k as its product says
  int block_bytes;
  int slices, slice_blocks, longer_slices;
  int one_over_slices;  // in units of 2^-16, rounded up: divides small numbers
  int units;            // blocks of threads that have something to do
  // Between the two times 16 stored rows that are added up together, in 16s: 1, or half a head if
  // rotary_kv follows.
  int apart = 1;
  bool bf16_scales, gated;

  __device__ __forceinline__ int over_slices(int v) const { return v * one_over_slices >> 16; }
};

// rotary_kv behind the last link.
struct Rotary {
  void* k_cache;
  void* v_cache;
  const void* bias;
  const float* inv_freq;
  float attention_scaling;
  int num_heads, num_kv_heads;
  StepRows rows;
};

// Who combines what attention left, so that the first link can read it.
enum class Combines {
  kNobody,
  kEachItsSlice,  // of one row, straight into the ring: the same columns in several blocks
  kTogether,      // all blocks, to memory, and wait for one another
};

struct ChainArgs {
  Link links[kMaxChainLinks];
  Rotary rotary;
  ChainState* state;
  char* pieces;  // [units][slabs][groups][tiles of 16 rows][lanes] of 16 bytes
  int num_links, m;
  int min_units;  // of all links but the last
  Combines combines;
  int max_splits, head_dim;  // of attention
};

// Of kEachItsSlice, in blocks of k; each has a stage.
constexpr int kMaxCombinedBlocks = 8;

// What a block of threads multiplies of a link: packed blocks [begin, end) of the tiles `tile`,
// tile + gridDim.x, ...
struct Share {
  int tile, slice, begin, end;

  __device__ __forceinline__ explicit Share(const Link& link) {
    const int b = blockIdx.x;
    tile = link.over_slices(b);
    slice = b - tile * link.slices;
    begin = slice * link.slice_blocks + min(slice, link.longer_slices);
    end = begin + link.slice_blocks + (slice < link.longer_slices);
  }
};

// One output, after alpha, beta and the norm that x was owed. Returns what is stored.
template <typename T>
__device__ __forceinline__ T finished(const Link& link, float scale, float sum, T old) {
  const float value = __fmul_rn(scale, sum);
  return from_float<T>(link.beta == 0 ? value : __fmaf_rn(link.beta, to_float(old), value));
}
// Not infinite: before it is divided by the root of the mean square it may be large.
template <typename T>
__device__ __forceinline__ T bounded(float v) {
  constexpr float kMax = std::is_same_v<T, __half> ? 65504.0f : 3.38e38f;
  return from_float<T>(v > kMax ? kMax : v < -kMax ? -kMax : v);
}
__device__ __forceinline__ float silu_product(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

// What rotary_kv needs to know of row 0 and of elements `dim`, dim + 8 of a head and those half a
// head behind them.
struct Turn {
  Rotation rotations[2];
  int cell;  // [pages, 64]

  // What it reads was complete before the pass.
  __device__ __forceinline__ void load(const Rotary& rotary, int dim, bool is_value) {
    const StepRows& rows = rotary.rows;
    const int seq = rows.row_seqs[0], slot = rows.seq_slots[seq];
    const int in_slot = rows.slot_lengths[slot] + rows.first_row - rows.seq_row_begin[seq];
    const int64_t page = int64_t{slot} * rows.max_pages + in_slot / kPageSize;
    cell = rows.page_table[page] * kPageSize + in_slot % kPageSize;
    if (is_value) return;
    const float position = static_cast<float>(rows.positions[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rotations[half] =
          rotation_by(position * rotary.inv_freq[dim + half * 8], rotary.attention_scaling);
    }
  }
};

// A place in the ring that goes round, and the parity of its barriers' phase.
struct Stage {
  int index = 0, parity = 0;

  template <typename Ring>
  __device__ __forceinline__ void next(const Ring&) {
    if (++index == Ring::kStages) index = 0, parity ^= 1;
  }
};

// f(tile, k block) for the packed blocks of this block of threads.
template <typename F>
__device__ __forceinline__ void each_block(const Link& link, F f) {
  if (static_cast<int>(blockIdx.x) >= link.units) return;
  const Share share(link);
#pragma unroll 1
  for (int tile = share.tile; tile < link.tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int k_block = share.begin; k_block < share.end; ++k_block) f(tile, k_block);
  }
}

// How a block of 256 rows of W comes to a stage and is multiplied by rows of x [8 kGroups] beside
// it, 4 bits a weight.
template <typename Mma, typename T, int kGroups_, bool kZeros>
struct FourBits {
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowsBytes = 8 * kGroups * kRowBytes;
  static constexpr int kWeightBytes = kZeros ? kZeroOffset + kW4BlockRows : kZeroOffset;
  static constexpr float kScale = kUnpackedScale<T>;  // of its sums
  // Blocks that are on their way to a multiprocessor at a time. Memory is as busy with two as with
  // more, multiprocessors share it more evenly, and the rows of x, sums and counters that others
  // wait for do not stand in a long queue: 52 instead of 56 us for a layer at one row. From 32 rows
  // on the multiplying warps are the bound and more is better.
  static constexpr int kInFlight = kGroups <= 2 ? 2 : kGroups == 4 ? 3 : 5;

  // Whether blocks combine attention's results themselves: for one row.
  static constexpr bool kCombines = kGroups == 1;

  typename Mma::template LaneRows<kGroups> lane_rows;

  __device__ __forceinline__ explicit FourBits(const Link&) {}

  // Where element k of row 0 lies among the rows of a stage: see Wgmma::copy_rows.
  static __device__ __forceinline__ int row_offset(int k) { return k / 64 * 1024 + k % 64 * 2; }

  struct Source {
    const char* from;
    int bytes;

    __device__ __forceinline__ Source(const Link& link, int tile, int k_block)
        : from(link.blocks + (int64_t{tile} * link.k_blocks + k_block) * link.block_bytes),
          bytes(link.block_bytes) {
      ptx::opaque(from);  // or the compiler computes it where it is used, after waiting
    }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier, uint64_t policy) const {
      ptx::mbarrier_expect_bytes(barrier, bytes);
      ptx::bulk_copy(to, from, bytes, barrier, policy);
    }
  };
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const Link& link, int k_block,
                                                    uint32_t barrier) {
    ptx::mbarrier_expect_bytes(barrier, kRowsBytes);
    Wgmma::copy_rows<kGroups>(to, &link.x_map, k_block, barrier);
  }
  template <typename F>
  __device__ __forceinline__ void add_block(float (&sums)[2][kGroups][4], uint32_t rows,
                                            uint32_t weights, const Link& link, F release) const {
    cuda::add_block<Mma, T, kGroups, kZeros>(sums, rows, weights, lane_rows, link.bf16_scales,
                                             release);
  }
};

// The same for 16 bits a weight: 64 k, rows of 128 bytes whose 16-byte chunks are swizzled within 8
// rows, as the copy engine writes them. Of a gated W 128 rows of gate come before the same of up,
// and rows are taken by turns of eight, as 4-bit blocks store them. Multiplying hides behind memory
// up to 64 rows.
template <typename T, int kGroups_>
struct SixteenBits {
  using Element = T;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kCombines = false;  // too few stages
  static constexpr int kBlockK = 64, kBoxRows = kW4BlockRows / 2;
  static constexpr int kRowsBytes = 8 * kGroups * 128;
  static constexpr int kWeightBytes = kW4BlockRows * 128;
  static constexpr float kScale = 1;
  static constexpr int kInFlight = 2;

  MmaSync::LaneRows<kGroups> lane_rows;
  uint32_t lane_weights[2];  // of a lane's row for ldmatrix, of both tiles: its first or second k

  __device__ __forceinline__ explicit SixteenBits(const Link& link) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int row = threadIdx.x / 32 * 32 + t * 16 + lane % 16;
      const int at = link.gated ? row / 8 % 2 * kBoxRows + row / 16 * 8 + row % 8 : row;
      lane_weights[t] = at * 128 + ((lane / 16 ^ lane % 8) << 4);
    }
  }

  struct Source {
    const TensorMap* map;
    int k, row, second;  // the rows of both boxes

    __device__ __forceinline__ Source(const Link& link, int tile, int k_block)
        : map(&link.w_map),
          k(k_block * kBlockK),
          row(tile * (link.gated ? kBoxRows : kW4BlockRows)),
          second(row + (link.gated ? link.n / 2 : kBoxRows)) {}
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier, uint64_t policy) const {
      ptx::mbarrier_expect_bytes(barrier, kWeightBytes);
      ptx::tensor_copy(to, map, k, row, barrier, policy);
      ptx::tensor_copy(to + kWeightBytes / 2, map, k, second, barrier, policy);
    }
  };
  static __device__ __forceinline__ void fetch_rows(uint32_t to, const Link& link, int k_block,
                                                    uint32_t barrier) {
    ptx::mbarrier_expect_bytes(barrier, kRowsBytes);
    ptx::tensor_copy(to, &link.x_map, k_block * kBlockK, 0, barrier);
  }
  template <typename F>
  __device__ __forceinline__ void add_block(float (&sums)[2][kGroups][4], uint32_t rows,
                                            uint32_t weights, const Link&, F release) const {
    uint32_t x[2][kGroups][2];  // of two steps of 16 k
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      uint32_t r[4];
      if (kGroups > 1) {
#pragma unroll
        for (int group = 0; group < kGroups; group += 2) {
          ptx::ldmatrix4(r, rows + lane_rows.at(step * 2) + group * 8 * 128);
          x[step % 2][group][0] = r[0], x[step % 2][group][1] = r[1];
          x[step % 2][(group + 1) % kGroups][0] = r[2],
                                    x[step % 2][(group + 1) % kGroups][1] = r[3];
        }
      } else if (step % 2 == 0) {
        ptx::ldmatrix4(r, rows + lane_rows.at(step * 2));
        x[0][0][0] = r[0], x[0][0][1] = r[1], x[1][0][0] = r[2], x[1][0][1] = r[3];
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        uint32_t a[4];
        ptx::ldmatrix4(a, (weights + lane_weights[t]) ^ (step << 5));
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          ptx::mma_16x8x16<T>(sums[t][group], a, x[step % 2][group][0], x[step % 2][group][1]);
        }
      }
    }
    __syncwarp();
    release();
  }
};

// The ring in shared memory: as many stages of rows of x and a block of W as there is room for, all
// rows first, and the barriers that say that weights, or rows, are there, or that all warps are
// done with both; that the first rows of a link have come; that all warps have combined theirs.
template <typename Product>
struct Ring {
  static constexpr int kStageBytes = Product::kRowsBytes + Product::kWeightBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kBarriers = 3 * kStages + kMaxChainLinks + 1;
  static_assert(kMaxChainLinks <= kStages, "a thread for each stage initialises all barriers");
  uint32_t data, barriers;

  __device__ __forceinline__ uint32_t rows(const Stage& at) const {
    return data + at.index * Product::kRowsBytes;
  }
  __device__ __forceinline__ uint32_t weights(const Stage& at) const {
    return data + kStages * Product::kRowsBytes + at.index * Product::kWeightBytes;
  }
  __device__ __forceinline__ uint32_t weights_in(const Stage& at) const {
    return barriers + 8 * at.index;
  }
  __device__ __forceinline__ uint32_t rows_in(const Stage& at) const {
    return barriers + 8 * (kStages + at.index);
  }
  __device__ __forceinline__ uint32_t done(const Stage& at) const {
    return barriers + 8 * (2 * kStages + at.index);
  }
  __device__ __forceinline__ uint32_t x_in(int link) const {
    return barriers + 8 * (3 * kStages + link);
  }
  __device__ __forceinline__ uint32_t combined() const {
    return barriers + 8 * (3 * kStages + kMaxChainLinks);
  }
};

// Feeds the ring with weights as soon as there is room, by one thread. What is for a link whose x
// has not come yet comes block by block, so as not to stand in the way of sums, counters and rows
// that others wait for: once x of this block's first link has come, or from the beginning on if
// blocks combine together.
template <typename Product>
__device__ __forceinline__ void feed_weights(const ChainArgs& args, const Ring<Product>& ring) {
  const uint64_t policy = ptx::evict_first_policy();
  for (int i = 0; i < args.num_links; ++i) {
    if (args.links[i].blocks == nullptr) ptx::prefetch_map(&args.links[i].w_map);
  }
  Stage stage, landing;
  int in_flight = 0, first = -1;
#pragma unroll 1
  for (int i = 0; i < args.num_links; ++i) {
    each_block(args.links[i], [&](int tile, int k_block) {
      const typename Product::Source source(args.links[i], tile, k_block);
      if (first < 0) first = i;
      ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
      const bool is_early =
          !ptx::mbarrier_has_ended(ring.x_in(i), 0) &&
          (args.combines == Combines::kTogether || ptx::mbarrier_has_ended(ring.x_in(first), 0));
#pragma unroll 1
      for (; in_flight >= (is_early ? 1 : Product::kInFlight); --in_flight) {
        ptx::mbarrier_wait(ring.weights_in(landing), landing.parity);
        landing.next(ring);
      }
      ++in_flight;
      source.fetch(ring.weights(stage), ring.weights_in(stage), policy);
      stage.next(ring);
    });
  }
  ptx::pdl_wait();
}

// Of row `row` that attention left to combine (attention/combine.cuh) kWidth columns of each lane,
// the warp's from `column` on, which are of one head. Little code: it runs once in a launch, so all
// of it comes from L2. Waits for attention.
template <int kWidth, typename T>
__device__ __forceinline__ void combine_columns(uint32_t (&values)[kWidth / 2],
                                                const ChainArgs& args,
                                                const AttentionArgs<T>& attention,
                                                const RowSplits& splits, int row, int column) {
  using Vector = std::conditional_t<kWidth == 4, float4, float2>;
  constexpr int kAtOnce = 32 / kWidth;
  static_assert(kAtOnce % kSplitsOfRun == 0);
  const int lane = threadIdx.x % 32;
  const Partials partials(attention.scratch, args.max_splits,
                          attention.rows.num_rows * attention.num_heads, args.head_dim);
  const int row_head = row * attention.num_heads + column / args.head_dim;
  const float2* ml = partials.ml + row_head;
  const int64_t stride = partials.num_rows * args.head_dim;
  int first = splits.begin / kAtOnce * kAtOnce;
  const float* acc = partials.acc + first * stride + int64_t{row_head} * args.head_dim +
                     column % args.head_dim + lane * kWidth;
  float2 max_sum{};
  bool has_max_sum = false;
  float total[kWidth] = {};
  ptx::pdl_wait();
#pragma unroll 1
  for (; first < splits.count; first += kAtOnce) {
    float part[kAtOnce][kWidth] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, acc += stride) {
      if (!splits.has(first + i)) continue;
      *reinterpret_cast<Vector*>(part[i]) = *reinterpret_cast<const Vector*>(acc);
    }
    const float max =
        splits.has(first + lane) ? ml[(first + lane) * partials.num_rows].x : kMinusInfinity;
    if (!has_max_sum) {  // here, so that the partial results are on their way
      max_sum = max_and_sum<1>(ml, partials.num_rows, splits, attention.scale_log2);
      has_max_sum = true;
    }
    const float weight = weight_of(max, max_sum.x, attention.scale_log2);
#pragma unroll
    for (int run = 0; run < kAtOnce; run += kSplitsOfRun) {
      float run_sum[kWidth] = {};
#pragma unroll
      for (int i = run; i < run + kSplitsOfRun; ++i) {
        const float its_weight = __shfl_sync(0xffffffffu, weight, i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          run_sum[j] = __fmaf_rn(part[i][j], its_weight, run_sum[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = __fadd_rn(total[j], run_sum[j]);
    }
  }
  const float inverse = inverse_of(max_sum.y);
#pragma unroll
  for (int j = 0; j < kWidth; j += 2) {
    values[j / 2] = pack2<T>(normalised(total[j], inverse), normalised(total[j + 1], inverse));
  }
}

// Makes row 0 of x of the first link, as far as this block multiplies it, for the stages from the
// first on. By all multiplying warps.
template <typename Product, typename T>
__device__ __forceinline__ void combine_slice(char* shared, const Ring<Product>& ring,
                                              const ChainArgs& args,
                                              const AttentionArgs<T>& attention) {
  constexpr int kBlockK = kW4BlockK;  // that of all that combine so
  const Share share(args.links[0]);
  const RowSplits splits(attention, 0);
  const int lane = threadIdx.x % 32, num_blocks = share.end - share.begin;
  const int num_columns = attention.num_heads * args.head_dim;
#pragma unroll 1
  for (int k = ptx::uniform_warp() * 64; k < num_blocks * kBlockK; k += kWarps * 64) {
    const int column = share.begin * kBlockK + k;
    uint32_t value[1] = {0};
    if (column < num_columns && splits.count == 1) {
      ptx::pdl_wait();
      value[0] = __ldcg(reinterpret_cast<const uint32_t*>(attention.out + column) + lane);
    } else if (column < num_columns) {
      combine_columns<2>(value, args, attention, splits, 0, column);
    }
    const int offset =
        k / kBlockK * Product::kRowsBytes + Product::row_offset(k % kBlockK + lane * 2);
    *reinterpret_cast<uint32_t*>(shared + offset) = value[0];
  }
  ptx::shared_copy_fence();  // the stages are the copy engine's again afterwards
  ptx::named_barrier<1, kThreads>();
  if (threadIdx.x < num_blocks) {
    ptx::mbarrier_arrive(ring.rows_in(Stage{.index = static_cast<int>(threadIdx.x)}));
  }
}

// Writes this block's part of all rows of `out`, once attention is done; `combined` counts warps.
template <int kWidth, typename T>
__device__ __forceinline__ void combine_rows(const ChainArgs& args,
                                             const AttentionArgs<T>& attention, uint32_t combined) {
  constexpr int kColumns = 32 * kWidth;
  const int lane = threadIdx.x % 32, num_columns = attention.num_heads * args.head_dim;
  const int per_row = num_columns / kColumns, num_items = attention.rows.num_rows * per_row;
  int item = ptx::uniform_warp() * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (; item < num_items; item += kWarps * gridDim.x) {
    const int row = item / per_row, column = item % per_row * kColumns;
    const RowSplits splits(attention, row);
    if (splits.count == 1) continue;  // it is written already
    uint32_t values[kWidth / 2];
    combine_columns<kWidth>(values, args, attention, splits, row, column);
    T* to = attention.out + int64_t{row} * num_columns + column + lane * kWidth;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(values[0], values[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = values[0];
    }
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(combined);
}

// Feeds it with rows of x once all blocks are done with the links before, by another.
template <typename Product>
__device__ __forceinline__ void feed_rows(const ChainArgs& args, const Ring<Product>& ring) {
  for (int i = 0; i < args.num_links; ++i) ptx::prefetch_map(&args.links[i].x_map);
  ptx::pdl_wait();
  // Read before this block arrives anywhere, so before they change.
  static_assert(kMaxChainLinks == 4);
  const uint4 bases = __ldcg(reinterpret_cast<const uint4*>(args.state->bases));
  if (args.combines == Combines::kTogether) {
    ptx::mbarrier_wait(ring.combined(), 0);
    ptx::add_release(args.state->arrived[0]);
  }
  Stage stage;
#pragma unroll 1
  for (int i = 0; i < args.num_links; ++i) {
    const Link& link = args.links[i];
    if ((i > 0 || args.combines == Combines::kTogether) &&
        static_cast<int>(blockIdx.x) < link.units) {
      const uint32_t base = i == 0 ? bases.x : i == 1 ? bases.y : i == 2 ? bases.z : bases.w;
      while (ptx::load_acquire(args.state->arrived[i]) != base + gridDim.x) {
      }
      ptx::copy_engine_fence();
    }
    each_block(link, [&](int, int k_block) {
      ptx::mbarrier_wait(ring.done(stage), stage.parity ^ 1);
      if (i > 0 || args.combines != Combines::kEachItsSlice) {
        Product::fetch_rows(ring.rows(stage), link, k_block, ring.rows_in(stage));
      }
      stage.next(ring);
    });
  }
}

// Registers of 16 rows and more do not fit beside feeding warps of equal share; a whole warpgroup
// gives up its own.
template <int kGroups>
constexpr int kFeedingWarps = kGroups >= 2 ? 4 : 2;

template <typename Product>
__global__ void __launch_bounds__(kThreads + 32 * kFeedingWarps<Product::kGroups>, 1)
    gemm_chain_kernel(const __grid_constant__ ChainArgs args,
                      const __grid_constant__ AttentionArgs<typename Product::Element> attention) {
  using T = typename Product::Element;
  using Ring = Ring<Product>;
  constexpr int kGroups = Product::kGroups;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  __shared__ float row_scales[8 * kGroups];
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  Ring ring{ptx::shared_address(shared), ptx::shared_address(barriers)};
  ptx::opaque(ring.data);  // computed once
  ptx::opaque(ring.barriers);
  Stage stage;

  Trace trace;

  ptx::pdl_launch();
  if (threadIdx.x < Ring::kStages) {
    const Stage mine{.index = static_cast<int>(threadIdx.x)};
    ptx::mbarrier_init(ring.weights_in(mine), 1);
    ptx::mbarrier_init(ring.rows_in(mine), 1);
    ptx::mbarrier_init(ring.done(mine), kWarps);
    if (threadIdx.x < kMaxChainLinks) ptx::mbarrier_init(ring.x_in(threadIdx.x), 1);
    if (threadIdx.x == 0) ptx::mbarrier_init(ring.combined(), kWarps);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= kWarps) {
    if constexpr (kFeedingWarps<kGroups> == 4) ptx::give_registers<40>();
    if (threadIdx.x == kThreads) {
      feed_weights(args, ring);
    } else if (threadIdx.x == kThreads + 32) {
      feed_rows(args, ring);
    } else {
      ptx::pdl_wait();
    }
    return;
  }
  if constexpr (kFeedingWarps<kGroups> == 4) ptx::take_registers<232>();
  if (args.combines == Combines::kTogether) {
    args.head_dim == 64 ? combine_rows<2>(args, attention, ring.combined())
                        : combine_rows<4>(args, attention, ring.combined());
  }
  if constexpr (Product::kCombines) {
    if (args.combines == Combines::kEachItsSlice &&
        static_cast<int>(blockIdx.x) < args.links[0].units) {
      combine_slice(shared, ring, args, attention);
    }
  }
  ptx::pdl_wait();
  trace.stamp(1);
  uint32_t turn = __ldcg(&args.state->launches) % 2;
  // Who has no part in a link has nothing to wait for.
  if (static_cast<int>(blockIdx.x) >= args.min_units) {
    ptx::opaque(turn);  // read, by all warps, before the last block may change it
    ptx::named_barrier<1, kThreads>();
    for (int i = 0; i + 1 < args.num_links && threadIdx.x == 0; ++i) {
      if (static_cast<int>(blockIdx.x) >= args.links[i].units) {
        ptx::add_release(args.state->arrived[i + 1]);
      }
    }
  }
  if (blockIdx.x == 0) {
    ExactSum* next = args.state->squares[turn ^ 1][0];
#pragma unroll 1
    for (int i = threadIdx.x; i < kMaxChainLinks * kMaxRows; i += kThreads) next[i] = {0, 0};
  }

  const int g = lane / 4, q2 = lane % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < args.num_links; ++i) {
    const Link& link = args.links[i];
    if (static_cast<int>(blockIdx.x) >= link.units) continue;
    const Share share(link);
    const Product product(link);
    T* const y = static_cast<T*>(link.y);
    const bool alone = link.slices == 1 && link.gated;  // sums go to y as they are
    const bool rotated = Product::kGroups == 1 && link.apart > 1;
    // The slabs (32 rows of W each) of a tile whose sums this block adds up.
    const int slice = share.slice;
    const int first_slab = link.over_slices(kWarps * slice + link.slices - 1);
    const int num_items =
        (link.over_slices(kWarps * (slice + 1) + link.slices - 1) - first_slab) * kGroups;
#pragma unroll 1
    for (int tile = share.tile; tile < link.tiles; tile += gridDim.x) {
      const int n0 = tile * kW4BlockRows;
      // An item is two times 16 stored rows and 8 rows of x, done by a warp: a lane has rows row,
      // row + 1 and stored rows n, n + 8 of both. The norm's or rotary's weights, rotary's angles
      // and their y are asked for long before they are needed.
      T old[2][2][2], weight[2][2];
      [[maybe_unused]] Turn turn_of_row;
      // Of the 16s of a tile, the first of an item's two.
      const auto first_sixteen = [&](int item) {
        const int slab = first_slab + item / kGroups;
        return 2 * slab - (slab & (link.apart - 1));
      };
      const auto load_weights = [&](int item) {
        const T* weights = static_cast<const T*>(rotated ? args.rotary.bias : link.norm_weight);
        if (weights == nullptr) return;
        const int n = n0 + first_sixteen(item) * 16 + g;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = n + t * link.apart * 16 + half * 8;
            if (at < link.n) weight[t][half] = weights[at];
          }
        }
      };
      const auto load_old = [&](int item) {
        if (link.beta == 0) return;
        const int row = item % kGroups * 8 + q2, n = n0 + first_sixteen(item) * 16 + g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (row + j >= args.m) continue;
          const T* from = y + int64_t{row + j} * link.n + n;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (n + t * 16 + half * 8 < link.n) old[t][half][j] = from[t * 16 + half * 8];
            }
          }
        }
      };

      if (rotated && warp < num_items) {
        const int n = n0 + first_sixteen(warp) * 16 + g, dims = link.apart * 32;
        turn_of_row.load(args.rotary, n % dims,
                         n / dims >= args.rotary.num_heads + args.rotary.num_kv_heads);
      }
      if (kGroups < 8 && !alone && warp < num_items) load_weights(warp);
      ptx::mbarrier_wait(ring.rows_in(stage), stage.parity);  // so the links before have arrived
      if (threadIdx.x == 0 && tile == share.tile) ptx::mbarrier_arrive(ring.x_in(i));
      trace.stamp(3 * i + 2);
      ExactSum squares_of_x{};
      const auto prefetch = [&] {
        if (link.inv_size != 0 && threadIdx.x < args.m) {
          const ExactSum& sum = args.state->squares[turn][i - 1][threadIdx.x];
          squares_of_x = {__ldcg(&sum.high), __ldcg(&sum.low)};
        }
        if (!alone && warp < num_items) load_old(warp);
      };
      if constexpr (kGroups < 8) prefetch();  // else there are too few registers

      float sums[2][kGroups][4] = {};
      for (int k_block = share.begin; k_block < share.end; ++k_block) {
        ptx::mbarrier_wait(ring.rows_in(stage), stage.parity);
        ptx::mbarrier_wait(ring.weights_in(stage), stage.parity);
        product.add_block(sums, ring.rows(stage), ring.weights(stage), link, [&] {
          if (lane == 0) ptx::mbarrier_arrive(ring.done(stage));
        });
        stage.next(ring);
      }

      trace.stamp(3 * i + 3);
      if constexpr (kGroups == 8) {
        prefetch();
        if (!alone && warp < num_items) load_weights(warp);
      }
      if (threadIdx.x < 8 * kGroups) {
        float scale = link.alpha;
        if (link.inv_size != 0) {
          scale *= rsqrtf(squares_of_x.value() * link.inv_size + link.eps);
        }
        row_scales[threadIdx.x] = scale;
      }
      if (alone && n0 + kW4BlockRows <= link.n) {
        ptx::named_barrier<1, kThreads>();
        const int columns = link.n / 2, n = n0 + warp * 32 + g;
        T* to = y + int64_t{q2} * columns + n / 16 * 8 + g;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (group * 8 + q2 + j < args.m) {
              const float scale = row_scales[group * 8 + q2 + j];
#pragma unroll
              for (int t = 0; t < 2; ++t) {
                to[t * 8] = from_float<T>(silu_product(__fmul_rn(scale, sums[t][group][j]),
                                                       __fmul_rn(scale, sums[t][group][j + 2])));
              }
            }
            to += (j == 0 ? 1 : 7) * static_cast<int64_t>(columns);
          }
        }
        ptx::named_barrier<1, kThreads>();
        continue;
      }

      // Sums go to the block that owns their slab, if only this one.
      constexpr int kPieces = kWarps * kGroups * 2 * 32;  // of a unit
      const int first_unit = link.slices == 1 ? blockIdx.x : blockIdx.x - slice;
      char* const pieces = args.pieces + (int64_t{first_unit} * kPieces + lane) * 16;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group * 8 + q2 < args.m) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            ptx::store_relaxed16(
                pieces + (slice * kPieces + ((warp * kGroups + group) * 2 + t) * 32) * 16,
                sums[t][group]);
          }
        }
      }
      ptx::named_barrier<1, kThreads>();  // row_scales
#pragma unroll 1
      for (int item = warp; item < num_items; item += kWarps) {
        if (kGroups > 1 && item != warp) load_weights(item), load_old(item);
        const int row = item % kGroups * 8 + q2, sixteen = first_sixteen(item);
        const int n = n0 + sixteen * 16 + g;
        const auto piece_of = [&](int t) {
          const int at = sixteen + t * link.apart;
          return pieces + ((at / 2 * kGroups + item % kGroups) * 2 + at % 2) * 512;
        };
        char* const from[2] = {piece_of(0), piece_of(1)};
        float sum[2][4] = {};
        if (row < args.m) {
          uint4 v[8][2];
          const auto each = [&](auto f) {
#pragma unroll
            for (int s = 0; s < 8; ++s) {
#pragma unroll
              for (int t = 0; t < 2; ++t) {
                if (s < link.slices) f(v[s][t], t, from[t] + s * kPieces * 16);
              }
            }
          };
          bool missing;
          do {
            missing = false;
            each([&](uint4& piece, int, const char* at) { piece = ptx::load_relaxed16(at); });
            each([&](const uint4& piece, int, char*) {
              missing |= piece.x == kNotYet || piece.y == kNotYet || piece.z == kNotYet ||
                         piece.w == kNotYet;
            });
          } while (missing);
          each([&](const uint4& piece, int t, char* at) {
            sum[t][0] += __uint_as_float(piece.x), sum[t][1] += __uint_as_float(piece.y);
            sum[t][2] += __uint_as_float(piece.z), sum[t][3] += __uint_as_float(piece.w);
            *reinterpret_cast<uint4*>(at) = make_uint4(kNotYet, kNotYet, kNotYet, kNotYet);
          });
        }
        __syncwarp();
        if (rotated) {
          if (n >= link.n || row > 0) continue;
          const Rotary& rotary = args.rotary;
          const int dims = link.apart * 32, head = n / dims, dim = n % dims;
          const int kv_head = head - rotary.num_heads;
          const bool is_value = kv_head >= rotary.num_kv_heads;
          T* to = y + n;
          if (kv_head >= 0) {
            const int64_t page = turn_of_row.cell / kPageSize;
            const int64_t at = page * rotary.num_kv_heads + kv_head % rotary.num_kv_heads;
            to = static_cast<T*>(is_value ? rotary.v_cache : rotary.k_cache) +
                 (at * kPageSize + turn_of_row.cell % kPageSize) * dims + dim;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              x[t] = to_float(finished(link, row_scales[0], sum[t][half * 2], T()));
              if (rotary.bias != nullptr) x[t] += to_float(weight[t][half]);
            }
            if (!is_value) rotate(x[0], x[1], turn_of_row.rotations[half]);
            to[half * 8] = from_float<T>(x[0]);
            to[dims / 2 + half * 8] = from_float<T>(x[1]);
          }
          continue;
        }
        const int left = link.n - n;
        float squares[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (row + j >= args.m) continue;
          const float scale = row_scales[row + j];
          if (link.gated) {
            T* to = y + int64_t{row + j} * (link.n / 2) + n / 16 * 8 + g;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              if (t * 16 >= left) continue;
              to[t * 8] = from_float<T>(
                  silu_product(__fmul_rn(scale, sum[t][j]), __fmul_rn(scale, sum[t][j + 2])));
            }
            continue;
          }
          const int64_t at = int64_t{row + j} * link.n + n;
          T* const to = y + at;
          T* const normed = static_cast<T*>(link.normed) + at;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (t * 16 + half * 8 >= left) continue;
              const T value = finished(link, scale, sum[t][half * 2 + j], old[t][half][j]);
              to[t * 16 + half * 8] = value;
              if (link.normed != nullptr) {
                normed[t * 16 + half * 8] = bounded<T>(to_float(value) * to_float(weight[t][half]));
                squares[j] += to_float(value) * to_float(value);
              }
            }
          }
        }
        if (link.normed == nullptr) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float v = squares[j];
#pragma unroll
          for (int mask = 4; mask < 32; mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
          if (g == 0 && row + j < args.m) args.state->squares[turn][i][row + j].add(v);
        }
      }
      ptx::named_barrier<1, kThreads>();
    }
    trace.stamp(3 * i + 4);
    if (i + 1 < args.num_links && threadIdx.x == 0) {
      ptx::add_release(args.state->arrived[i + 1]);
    }
  }
  trace.end();
  // Block 0 has a part in every link, so here all blocks have arrived behind all others, and so
  // have read both.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (args.combines == Combines::kTogether) args.state->bases[0] += gridDim.x;
    for (int i = 1; i < args.num_links; ++i) args.state->bases[i] += gridDim.x;
    if (args.num_links > 1) ++args.state->launches;
  }
}

// As many as find a block of threads each.
int slices_of(const Link& link, int blocks) {
  return std::clamp(blocks / link.tiles, 1, std::min(kWarps, link.k_blocks));
}

Rotary make_rotary(const RotaryKvParams& from) {
  return {.k_cache = from.k_cache.data(),
          .v_cache = from.v_cache.data(),
          .bias = from.bias.data(),
          .inv_freq = from.inv_freq,
          .attention_scaling = from.attention_scaling,
          .num_heads = from.num_heads,
          .num_kv_heads = from.num_kv_heads,
          .rows = from.rows};
}

Link make_link(const ChainLink& from, const ChainLink* before, const Tensor& y, const Tensor& x,
               const Tensor& normed, int groups, int blocks) {
  const int k = static_cast<int>(x.size(1)), n = static_cast<int>(from.stored_rows());
  Link link{.x_map = make_map(x.data(), static_cast<int>(x.size(0)), k, x.dtype(), 8 * groups),
            .y = y.data(),
            .normed = normed.empty() ? nullptr : normed.data(),
            .norm_weight = normed.empty() ? nullptr : from.norm_weight.data(),
            .alpha = from.alpha,
            .beta = from.beta,
            .n = n,
            .tiles = (n + kW4BlockRows - 1) / kW4BlockRows,
            .gated = from.is_gated()};
  if (from.is_dense()) {
    using Product = SixteenBits<__half, 1>;
    link.w_map = make_map(from.w.data(), n, k, x.dtype(), Product::kBoxRows);
    link.k_blocks = (k + Product::kBlockK - 1) / Product::kBlockK;
  } else {
    link.blocks = static_cast<const char*>(from.w4.blocks);
    link.k_blocks = static_cast<int>(from.w4.k_blocks());
    link.block_bytes = static_cast<int>(from.w4.block_bytes());
    link.bf16_scales = from.w4.scale_dtype == DType::kBF16;
  }
  link.slices = slices_of(link, blocks);
  link.slice_blocks = link.k_blocks / link.slices;
  link.longer_slices = link.k_blocks % link.slices;
  link.one_over_slices = (1 << 16) / link.slices + 1;
  link.units = std::min(link.tiles * link.slices, blocks);
  if (before != nullptr && !before->normed.empty()) {
    link.inv_size = 1.0f / static_cast<float>(k);
    link.eps = before->norm_eps;
  }
  return link;
}

Combines who_combines(const ChainParams& p, const Link& first, int blocks) {
  const int rows = p.attention.rows.num_rows, count = num_splits(p.attention.rows.max_kv);
  if (rows == 0 || count == 1) return Combines::kNobody;
  const bool is_short = count <= kMaxCombinedSplits;
  if (rows == 1 && is_short && !p.links.front().is_dense() && first.tiles <= blocks &&
      first.slice_blocks + (first.longer_slices > 0) <= kMaxCombinedBlocks) {
    return Combines::kEachItsSlice;
  }
  // One warp goes through all splits of a head: where there are many they should be busy.
  const bool is_busy = rows * p.attention.num_heads >= blocks * kWarps / 2;
  return is_short || is_busy ? Combines::kTogether : Combines::kNobody;
}

template <typename Product>
void launch_chain(const Context& ctx, ChainArgs args, const AttentionParams& attention,
                  int blocks) {
  using Ring = Ring<Product>;
  const auto kernel = gemm_chain_kernel<Product>;
  static_assert(Product::kInFlight < Ring::kStages, "what lands has a stage of its own");
  static_assert(!Product::kCombines || kMaxCombinedBlocks <= Ring::kStages);
  for (Link& link : args.links) link.alpha /= Product::kScale;
  allow_shared_bytes(kernel, Ring::kBytes);
  launch(ctx, kernel, dim3(blocks), dim3(kThreads + 32 * kFeedingWarps<Product::kGroups>),
         Ring::kBytes, args, make_args<typename Product::Element>(attention));
}

template <typename Mma, typename T, int kGroups>
void launch_four_bits(const Context& ctx, const ChainArgs& args, const AttentionParams& attention,
                      int blocks, bool zeros) {
  zeros ? launch_chain<FourBits<Mma, T, kGroups, true>>(ctx, args, attention, blocks)
        : launch_chain<FourBits<Mma, T, kGroups, false>>(ctx, args, attention, blocks);
}

}  // namespace

void gemm_chain_prepare_sm90(const Context& ctx, const Tensor& memory) {
  fill_bytes(ctx.device, memory.data(), 0xFF, memory.num_bytes(), ctx.stream);
  fill_bytes(ctx.device, memory.data(), 0, kStateBytes, ctx.stream);
}

void gemm_chain_sm90(const Context& ctx, const ChainParams& p) {
  const int64_t num_rows = p.links.front().x.size(0);
  const bool has_attention = !p.attention.out.empty(), has_rotary = !p.rotary.qkv.empty();
  // With more rows a cycle took 1 to 3 % longer so than with a launch between.
  const bool rotates = has_rotary && num_rows == 1;
  CHECK(p.memory.num_bytes() >= gemm_chain_bytes(num_rows),
        "gemm_chain: {} bytes of memory, expected {} for {} rows", p.memory.num_bytes(),
        gemm_chain_bytes(num_rows), num_rows);
  const int blocks = std::min(ctx.sm_count, kMaxChainBlocks);
  if (has_rotary) check_rotary_kv(p.rotary);
  bool zeros = false;
  for (const ChainLink& link : p.links) zeros |= link.w4.zero_points;
  for (int64_t row = 0; row < num_rows; row += kMaxRows) {
    const int64_t m = std::min<int64_t>(kMaxRows, num_rows - row);
    const int groups = groups_of(static_cast<int>(m));
    ChainArgs args{.state = p.memory.as<ChainState>(),
                   .pieces = p.memory.as<char>() + kStateBytes,
                   .num_links = static_cast<int>(p.links.size()),
                   .m = static_cast<int>(m),
                   .min_units = blocks};
    for (size_t i = 0; i < p.links.size(); ++i) {
      const ChainLink& link = p.links[i];
      const Tensor normed = link.normed.empty() ? Tensor() : link.normed.rows(row, m);
      args.links[i] = make_link(link, i > 0 ? &p.links[i - 1] : nullptr, link.y.rows(row, m),
                                link.x.rows(row, m), normed, groups, blocks);
      if (i + 1 < p.links.size()) args.min_units = std::min(args.min_units, args.links[i].units);
    }
    if (has_attention && row == 0) {
      args.combines = who_combines(p, args.links[0], blocks);
      args.max_splits = num_splits(p.attention.rows.max_kv);
      args.head_dim = p.attention.head_dim;
      if (args.combines == Combines::kNobody) cuda::attention_combine(ctx, p.attention);
    }
    if (rotates) {
      args.rotary = make_rotary(p.rotary);
      args.links[p.links.size() - 1].apart = p.rotary.head_dim / 32;
    }
    dispatch_half(p.links.front().x.dtype(), [&](auto t) {
      using T = decltype(t);
      const bool dense = p.links.front().is_dense();
      switch (groups) {
        case 1:
          return dense ? launch_chain<SixteenBits<T, 1>>(ctx, args, p.attention, blocks)
                       : launch_four_bits<MmaSync, T, 1>(ctx, args, p.attention, blocks, zeros);
        case 2:
          return dense ? launch_chain<SixteenBits<T, 2>>(ctx, args, p.attention, blocks)
                       : launch_four_bits<MmaSync, T, 2>(ctx, args, p.attention, blocks, zeros);
        case 4:
          return dense ? launch_chain<SixteenBits<T, 4>>(ctx, args, p.attention, blocks)
                       : launch_four_bits<Wgmma, T, 4>(ctx, args, p.attention, blocks, zeros);
        default:
          dense ? launch_chain<SixteenBits<T, 8>>(ctx, args, p.attention, blocks)
                : launch_four_bits<WgmmaOf<1>, T, 8>(ctx, args, p.attention, blocks, zeros);
      }
    });
  }
  if (has_rotary && !rotates) cuda::rotary_kv(ctx, p.rotary);
}

}  // namespace cpmcu::cuda
