// select_blocks: the blocks that each token and KV head attends to (sparse.h).
//
//   f[r] = sum over heads h of exp(q_h . fine[r] - m_h) / Z_h,  score(b) = max f[4 b .. 4 b + 4]
//
// Roofline: a CTA reads 2 * D bytes of each visible compressed key from L2, 5 keys for a block.
//
// Schedule: a CTA has one token and KV head.
//   1. Each of four warps takes every fourth tile of 32 coarse keys and keeps maximum and sum of
//      each head in registers, with the query heads as the 16 rows of an mma. The warps' maxima
//      and sums are combined in order.
//   2. The same for fine keys: f[r] of all heads goes to shared memory.
//   3. The scores of the blocks between become 64-bit numbers: the score's bits, then the inverse
//      of the block. A binary search finds the count-th largest; blocks from it on are chosen.
//
// Surprising: scores are not negative, so their bits order like integers. With the block's number
// in the low bits no two are equal, and a tie goes to the lower block by itself.
#include <climits>

#include "core/dispatch.h"
#include "core/reduce.cuh"
#include "kernels/attention/sparse_checks.h"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTileKeys = 32;  // compressed keys of a warp's tile
constexpr int kHeads = 16;     // query heads of an mma
constexpr int kBlockBits = 14;

template <typename T>
struct SelectArgs {
  uint64_t* selection;  // [T, Hkv, words]
  const T* qkv;
  const T* fine;    // [pages, Hkv, 4, D]
  const T* coarse;  // [pages, Hkv, 1, D]
  float scale_log2;
  int num_words;
  int group;    // query heads of a KV head
  int qkv_row;  // elements from one row of qkv to the next
  int q_head;   // elements from one query head to the next
  SparseRule rule;
  StepTokens tokens;
};

template <typename T, int kDim>
struct SelectSmem {
  union {
    SwizzledTile<T, kTileKeys, kDim> keys[kWarps];
    SwizzledTile<T, kHeads, kDim> queries;  // until they are in registers
  };
  float2 states[kWarps][kHeads];  // maximum and sum of each head
  int counts[2];                  // two, so that one barrier separates two rounds
};

// One token and KV head.
template <typename T, int kDim>
struct SelectCta {
  const SelectArgs<T>& args;
  SelectSmem<T, kDim>& smem;
  float* const f;  // [fine_end]
  const int kv_head, num_kv_heads;
  const int* const pages;
  const QueryBlocks blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Loads a warp's tile: keys [first, first + 32) of a plane with kRows rows a page. Keys from
  // `end` on are zero.
  template <int kRows>
  __device__ __forceinline__ void load_tile(const T* plane, int first, int end) const {
    constexpr int kChunks = kDim / 8;
    auto& tile = smem.keys[warp];
    __syncwarp();  // the previous tile is no longer read
#pragma unroll 4
    for (int i = lane; i < kTileKeys * kChunks; i += 32) {
      const int key = first + i / kChunks, c = i % kChunks;
      const int64_t page = key < end ? pages[key / kRows] : 0;
      const int64_t row = (page * num_kv_heads + kv_head) * kRows + key % kRows;
      ptx::cp_async16(tile.address(i / kChunks, c), plane + row * kDim + c * 8, key < end);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  // Scores in base 2 of 16 heads against the warp's tile. Key 0 and keys from `end` on get -inf.
  __device__ __forceinline__ void score_tile(float (&scores)[kTileKeys / 8][4],
                                             const uint32_t (&queries)[kDim / 16][4], int first,
                                             int end) const {
    float products[1][kTileKeys / 8][4];
    multiply_keys<T>(products, smem.keys[warp], 0, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
    });
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + n * 8 + lane % 4 * 2 + i % 2;
        const bool exists = key > 0 && key < end;
        scores[n][i] = exists ? __fmul_rn(products[0][n][i], args.scale_log2) : kMinusInfinity;
      }
    }
  }

  // Maximum, and sum of 2^(s - maximum), of each head over the coarse keys.
  __device__ __forceinline__ void normaliser(float2 (&states)[2],
                                             const uint32_t (&queries)[kDim / 16][4]) const {
    float maximum[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0, 0};
    for (int first = warp * kTileKeys; first < blocks.coarse_end(); first += kWarps * kTileKeys) {
      load_tile<1>(args.coarse, first, blocks.coarse_end());
      float scores[kTileKeys / 8][4];
      score_tile(scores, queries, first, blocks.coarse_end());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = maximum[half];
#pragma unroll
        for (int n = 0; n < kTileKeys / 8; ++n) {
          best = fmaxf(best, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
        const float offset = best == kMinusInfinity ? 0.0f : best;
        float part = 0;
#pragma unroll
        for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            part = __fadd_rn(part, exp2f(scores[n][i] - offset));
          }
        }
        sum[half] = __fmaf_rn(sum[half], exp2f(maximum[half] - offset), quad_sum(part));
        maximum[half] = best;
      }
    }
    __syncthreads();  // the states of earlier heads are no longer read
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        smem.states[warp][half * 8 + lane / 4] = make_float2(maximum[half], sum[half]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = half * 8 + lane / 4;
      float best = kMinusInfinity, total = 0;
      for (int i = 0; i < kWarps; ++i) best = fmaxf(best, smem.states[i][head].x);
      const float offset = best == kMinusInfinity ? 0.0f : best;
      for (int i = 0; i < kWarps; ++i) {
        const float2 state = smem.states[i][head];
        total = __fmaf_rn(state.y, exp2f(state.x - offset), total);
      }
      states[half] = make_float2(offset, total);
    }
  }

  // Adds the probabilities of the heads [first_head, first_head + 16) to f.
  __device__ __forceinline__ void add_heads(int first_head, int row) const {
    const int num_heads = min(args.group - first_head, kHeads);
    const T* from = args.qkv + static_cast<int64_t>(row) * args.qkv_row +
                    static_cast<int64_t>(kv_head * args.group + first_head) * args.q_head;
    fetch_tile<kThreads>(smem.queries, from, args.q_head, num_heads);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    uint32_t queries[kDim / 16][4];
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragment_a(queries[k16], smem.queries, 0, k16);
    __syncthreads();  // keys replace the queries
    float2 states[2];
    normaliser(states, queries);

    for (int first = warp * kTileKeys; first < blocks.fine_end(); first += kWarps * kTileKeys) {
      load_tile<kFineRows>(args.fine, first, blocks.fine_end());
      float scores[kTileKeys / 8][4];
      score_tile(scores, queries, first, blocks.fine_end());
#pragma unroll
      for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          float sum = 0;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float p = exp2f(scores[n][2 * half + column] - states[half].x);
            const bool exists = half * 8 + lane / 4 < num_heads;
            sum = __fadd_rn(sum, exists ? __fdiv_rn(p, states[half].y) : 0.0f);
          }
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2) {  // over the rows of the mma
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
          }
          const int key = first + n * 8 + lane % 4 * 2 + column;
          if (lane < 4 && key < blocks.fine_end()) {
            f[key] = first_head == 0 ? sum : __fadd_rn(f[key], sum);
          }
        }
      }
    }
    __syncthreads();  // f is complete, and the keys are no longer read
  }

  // The score of a block between, with the block in the low bits.
  __device__ __forceinline__ uint64_t key_of(int block) const {
    float best = 0;  // also for NaN
    for (int r = max(kFineRows * block, 1); r < min(kFineRows * (block + 1) + 1, blocks.fine_end());
         ++r) {
      best = fmaxf(best, f[r]);
    }
    return static_cast<uint64_t>(__float_as_uint(best)) << kBlockBits |
           ((1u << kBlockBits) - 1 - block);
  }

  // The count-th largest key.
  __device__ __forceinline__ uint64_t threshold() const {
    uint64_t found = 0;
    for (int bit = 31 + kBlockBits; bit >= 0; --bit) {
      const uint64_t tried = found | uint64_t{1} << bit;
      int* const count = &smem.counts[bit % 2];
      int mine = 0;
      for (int b = blocks.init_end + threadIdx.x; b < blocks.window_begin; b += kThreads) {
        mine += key_of(b) >= tried;
      }
      mine = warp_reduce(mine, Sum{});
      if (threadIdx.x == 0) *count = 0;
      __syncthreads();
      if (lane == 0 && mine > 0) atomicAdd(count, mine);
      __syncthreads();
      if (*count >= blocks.count) found = tried;
    }
    return found;
  }

  __device__ __forceinline__ void write(uint64_t* words, uint64_t from) const {
    const bool has_scores = blocks.needs_scores();
    for (int w = threadIdx.x; w < args.num_words; w += kThreads) {
      uint64_t word = 0;
      for (int i = 0; i < 64; ++i) {
        const int b = w * 64 + i;
        bool chosen = b < blocks.init_end || (b >= blocks.window_begin && b <= blocks.own);
        if (b >= blocks.init_end && b < blocks.window_begin) {
          chosen = has_scores ? key_of(b) >= from : blocks.count > 0;
        }
        word |= static_cast<uint64_t>(chosen) << i;
      }
      words[w] = word;
    }
  }
};

// ---- kernels

// Grid: (T, Hkv).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    select_blocks_kernel(const __grid_constant__ SelectArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<SelectSmem<T, kDim>*>(shared);
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x, kv_head = blockIdx.y, num_kv_heads = gridDim.y;
  const int slot = args.tokens.seq_slots[args.tokens.token_seqs[row]];
  const SelectCta<T, kDim> cta{
      args,
      smem,
      reinterpret_cast<float*>(shared + sizeof(SelectSmem<T, kDim>)),
      kv_head,
      num_kv_heads,
      args.tokens.page_table + static_cast<int64_t>(slot) * args.tokens.max_pages,
      blocks_of_query(args.rule, args.tokens.positions[row])};
  uint64_t from = 0;
  if (cta.blocks.needs_scores()) {
    for (int head = 0; head < args.group; head += kHeads) cta.add_heads(head, row);
    from = cta.threshold();
  }
  const int64_t index = static_cast<int64_t>(row) * num_kv_heads + kv_head;
  cta.write(args.selection + index * args.num_words, from);
}

// ---- launchers

template <typename T, int kDim>
void launch_select(const Context& ctx, const SelectBlocksParams& p) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  const auto kernel = select_blocks_kernel<T, kDim>;
  const size_t fine_keys = (p.tokens.max_kv + kFineStride - 1) / kFineStride;
  const size_t bytes = sizeof(SelectSmem<T, kDim>) + sizeof(float) * fine_keys;
  allow_shared_bytes(kernel, bytes);
  launch(ctx, kernel, dim3(p.tokens.num_tokens, p.num_kv_heads), kThreads, bytes,
         SelectArgs<T>{.selection = p.selection.as<uint64_t>(),
                       .qkv = p.qkv.as<const T>(),
                       .fine = p.keys.fine.as<const T>(),
                       .coarse = p.keys.coarse.as<const T>(),
                       .scale_log2 = p.scale * kLog2E,
                       .num_words = static_cast<int>(p.selection.size(2)),
                       .group = p.num_heads / p.num_kv_heads,
                       .qkv_row = layout.row,
                       .q_head = layout.q_head,
                       .rule = p.rule,
                       .tokens = p.tokens});
}

}  // namespace

// Graph-safe. Reads from the device: positions, token_seqs, seq_slots, page_table.
void select_blocks(const Context& ctx, const SelectBlocksParams& p) {
  check_select(p);
  if (p.tokens.num_tokens == 0) return;
  static_assert(sizeof(SelectSmem<__half, 128>) + sizeof(float) * kMaxSparseEntries / kFineStride <=
                    99 * 1024,
                "sm_86 and sm_89 have 99 KiB for a CTA");
  static_assert(kMaxSparseEntries / kPageSize <= 1 << kBlockBits, "a block must fit its bits");
  CHECK(p.tokens.max_kv <= kMaxSparseEntries,
        "select_blocks: a sequence of up to {} tokens, expected at most {} on CUDA",
        p.tokens.max_kv, kMaxSparseEntries);
  dispatch_half(p.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("select_blocks: head_dim", p.head_dim,
                          [&](auto dim) { launch_select<decltype(element), dim.value>(ctx, p); });
  });
}

}  // namespace cpmcu::cuda
