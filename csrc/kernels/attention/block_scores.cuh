// The scores of blocks for select_blocks: two passes over compressed keys, one for the normalisers
// m and Z of each head, one for the scores.
//
// A CTA has 128 compressed keys of a KV head and several tokens of a sequence. Each of four warps
// keeps 32 keys in registers as operands of mma. The rows are the 16 query heads of one token after
// the other. So a key is read once for all tokens of the CTA.
//
//   coarse pass  m and Z of each warp's 32 keys, then of all 128, in the order of warps
//   fine pass    f of each warp's 32 keys, then the largest f of each of the warp's eight blocks
//
// Maxima are rounded up to integers, so rescaling is exact (tiles.cuh). A normaliser is the sum of
// its parts in the order of keys. Parts lie at fixed keys, so no sum depends on the other tokens.
#pragma once

#include "kernels/attention/decode.cuh"
#include "kernels/attention/sparse_checks.h"

namespace cpmcu::cuda {

// select_blocks by one launch. False: the step has several tokens of a sequence, or too many
// sequences for the memory or the GPU.
bool select_one_token(const Context& ctx, const SelectBlocksParams& params);

namespace {

constexpr int kHeads = 16;                          // query heads in one mma
constexpr int kWarpKeys = 32;                       // compressed keys that one warp multiplies
constexpr int kTileBlocks = kWarpKeys / kFineRows;  // blocks that the fine keys of a warp belong to

// Scratch of a launch. A part is 128 coarse keys; num_heads is a multiple of 16.
struct BlockScores {
  float2* parts;  // [tokens, Hkv, num_parts, num_heads]: m and Z of each part
  // [tokens, Hkv, num_blocks]. Of every eight blocks, the last still lacks the f that `firsts`
  // holds.
  float* scores;
  // [tokens, Hkv, num_blocks / 8]: f of the first fine key of each eight blocks.
  float* firsts;
  int num_parts, num_heads, num_blocks;

  BlockScores(float* scratch, int num_tokens, int num_kv_heads, const BlockScoresShape& shape)
      : num_parts(shape.num_parts), num_heads(shape.num_heads), num_blocks(shape.num_blocks) {
    const int64_t rows = int64_t{num_tokens} * num_kv_heads;
    parts = reinterpret_cast<float2*>(scratch);
    scores = scratch + 2 * rows * num_parts * num_heads;
    firsts = scores + rows * num_blocks;
  }
  __device__ __forceinline__ float2* parts_of(int64_t row) const {
    return parts + row * num_parts * num_heads;
  }
  __device__ __forceinline__ float* scores_of(int64_t row) const {
    return scores + row * num_blocks;
  }
  __device__ __forceinline__ float* firsts_of(int64_t row) const {
    return firsts + row * (num_blocks / kTileBlocks);
  }
};

template <typename T>
struct ScoreArgs {
  const T* qkv;
  const T* fine;    // [pages, Hkv, 4, D]
  const T* coarse;  // [pages, Hkv, 1, D]
  float scale_log2;
  int group;           // query heads that share a KV head
  int qkv_row;         // elements from one row of qkv to the next
  int q_head;          // elements from one query head to the next
  bool keys_are_old;   // as in SelectBlocksParams
  int first, end;      // the tokens of this launch: [first, end)
  int num_groups;      // groups of tokens in each sequence
  int group_tokens;    // tokens in a group: at most kMaxItems / head tiles
  bool is_normalised;  // normalise_kernel has run
  SparseRule rule;
  BlockScores out;
  StepTokens tokens;
};

template <typename T, int kDim_>
struct ScoreConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kKeys = kWarps * kWarpKeys;  // compressed keys of a CTA
  // Maximum number of items of a CTA; an item is 16 heads of a token.
  static constexpr int kMaxItems = kDim / 2;
  static constexpr int kStages = 2, kStageItems = 4;
  static constexpr int kCtasPerSm = 3;
  static_assert(kKeys == kScorePart, "a part is the keys of a CTA");
};

template <typename Config>
struct ScoreSmem {
  using T = typename Config::Element;
  using States = float2[Config::kMaxItems][Config::kWarps][kHeads];
  using Keys = SwizzledTile<T, Config::kKeys, Config::kDim>;
  static_assert(sizeof(States) <= sizeof(Keys), "states replace the keys");
  Keys keys;  // once the keys are in registers, states of the coarse pass replace them
  SwizzledTile<T, kHeads, Config::kDim> queries[Config::kStages][Config::kStageItems];
  float normalisers[Config::kMaxItems][kHeads];  // m + log2 Z of each head
  int key_ends[Config::kMaxItems];               // keys that the item's token sees

  __device__ __forceinline__ States& states() { return reinterpret_cast<States&>(keys); }
};

// The tokens [begin, end) of a sequence, and the keys [first_key, end_key) that one of them sees.
struct ScoreRange {
  int slot, begin, end, first_key, end_key;
  bool is_empty;

  template <typename T>
  __device__ __forceinline__ ScoreRange(const ScoreArgs<T>& args, bool is_fine, int num_keys) {
    const int index = static_cast<int>(blockIdx.z), group = index % args.num_groups;
    const Sequence seq = load_sequence(args.tokens, index / args.num_groups);
    slot = seq.slot;
    begin = max(seq.token_begin, args.first) + group * args.group_tokens;
    end = min(min(begin + args.group_tokens, args.end), seq.token_begin + seq.num_tokens);
    // No token of the group has a higher position than the entry of the last one.
    const QueryBlocks blocks =
        blocks_of_query(args.rule, max(seq.first_entry + end - 1 - seq.token_begin, 0));
    first_key = static_cast<int>(blockIdx.x) * num_keys;
    end_key = is_fine ? blocks.fine_end() : blocks.coarse_end();
    is_empty = begin >= end || !blocks.needs_scores() || first_key >= end_key;
  }
};

// Starts the copy of a CTA's keys from a plane with kRows rows a page. Keys that no token sees
// become zero.
template <typename Config, int kRows>
__device__ __forceinline__ void fetch_keys(ScoreSmem<Config>& smem,
                                           const ScoreArgs<typename Config::Element>& args,
                                           const typename Config::Element* plane,
                                           const ScoreRange& range) {
  constexpr int kChunks = Config::kDim / 8, kStep = Config::kThreads / kChunks;
  constexpr int kCopies = Config::kKeys / kStep;
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks;
  const int* table =
      args.tokens.page_table + static_cast<int64_t>(range.slot) * args.tokens.max_pages;
  const int kv_head = static_cast<int>(blockIdx.y), num_kv_heads = static_cast<int>(gridDim.y);
  int pages[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int key = range.first_key + row + i * kStep;
    pages[i] = key < range.end_key ? table[key / kRows] : 0;
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int key = range.first_key + row + i * kStep;
    const int64_t from = (int64_t{pages[i]} * num_kv_heads + kv_head) * kRows + key % kRows;
    ptx::cp_async16(smem.keys.address(row + i * kStep, c), plane + from * Config::kDim + c * 8,
                    key < range.end_key);
  }
  ptx::cp_async_commit();
}

// Starts the copy of the queries of kStageItems items from `first` on.
template <typename Config>
__device__ __forceinline__ void fetch_queries(ScoreSmem<Config>& smem,
                                              const ScoreArgs<typename Config::Element>& args,
                                              const ScoreRange& range, int first, int num_items,
                                              int num_head_tiles) {
#pragma unroll 1
  for (int i = 0; i < Config::kStageItems && first + i < num_items; ++i) {
    const int row = range.begin + (first + i) / num_head_tiles;
    const int head = (first + i) % num_head_tiles * kHeads;
    const auto* from =
        args.qkv + static_cast<int64_t>(row) * args.qkv_row +
        static_cast<int64_t>(static_cast<int>(blockIdx.y) * args.group + head) * args.q_head;
    fetch_tile<Config::kThreads>(smem.queries[first / Config::kStageItems % Config::kStages][i],
                                 from, args.q_head, args.group - head);
  }
  ptx::cp_async_commit();
}

// m + log2 Z of an item's head, from the parts of the coarse pass. Heads that do not exist get
// infinity, so their f is 0.
template <typename T>
__device__ __forceinline__ float normaliser_of(const ScoreArgs<T>& args, int64_t row, int position,
                                               int head) {
  if (head >= args.group) return -kMinusInfinity;
  const QueryBlocks blocks = blocks_of_query(args.rule, position);
  if (!blocks.needs_scores()) return 0;  // no part was written, and no score is read
  const int num_parts = (blocks.coarse_end() + kScorePart - 1) / kScorePart;
  const float2* parts = args.out.parts_of(row) + head;
  float row_max = kMinusInfinity, sum = 0;
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) {
    const float2 part = parts[i * args.out.num_heads];
    const float larger = fmaxf(row_max, part.x);
    sum = __fmaf_rn(part.y, weight_of(part.x, larger), __fmul_rn(sum, weight_of(row_max, larger)));
    row_max = larger;
  }
  return __fadd_rn(row_max, log2f(sum));
}

// Stores each normaliser as m of its first part. One thread: one head of a token and KV head.
template <typename T>
__global__ void __launch_bounds__(256)
    normalise_kernel(const __grid_constant__ ScoreArgs<T> args, int num_kv_heads) {
  ptx::pdl_launch();
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = index / args.out.num_heads, head = index % args.out.num_heads;
  ptx::pdl_wait();
  if (row >= (args.end - args.first) * num_kv_heads) return;
  const int position = args.tokens.positions[args.first + row / num_kv_heads];
  args.out.parts_of(row)[head].x = normaliser_of(args, row, position, head);
}

// Sums eight columns over the query heads of a warp: f[n][c] is head lane / 4 of key
// 8 n + 2 (lane % 4) + c. A lane gets the sum of key `lane`. Each exchange halves the columns.
__device__ __forceinline__ float sum_over_heads(const float (&f)[kWarpKeys / 8][2]) {
  const int lane = threadIdx.x % 32;
  const auto exchange = [&](float low, float high, int mask) {
    const bool upper = (lane & mask) != 0;
    const float other = __shfl_xor_sync(0xffffffffu, upper ? low : high, mask);
    return __fadd_rn(upper ? high : low, other);
  };
  float half[2][2], quarter[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) half[n][c] = exchange(f[n][c], f[n + 2][c], 16);
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) quarter[c] = exchange(half[0][c], half[1][c], 8);
  const float sum = exchange(quarter[0], quarter[1], 4);
  // This lane has key 16 b4 + 8 b3 + 2 (lane % 4) + b2, with the bits b of `lane`.
  return __shfl_sync(0xffffffffu, sum, (lane & 24) | (lane & 1) << 2 | (lane >> 1 & 3));
}

// f of key `lane`, over 16 heads: 2^(score - normaliser), summed.
__device__ __forceinline__ float sum_of_powers(const float (&scores)[kWarpKeys / 8][4],
                                               const float (&normalisers)[kHeads],
                                               float scale_log2) {
  const int head = static_cast<int>(threadIdx.x) % 32 / 4;
  const auto power = [&](float score, float normaliser) {
    return ptx::exp2_approx(__fmaf_rn(score, scale_log2, -normaliser));
  };
  const float low = normalisers[head], high = normalisers[head + 8];
  float f[kWarpKeys / 8][2];
#pragma unroll
  for (int n = 0; n < kWarpKeys / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      f[n][c] = __fadd_rn(power(scores[n][c], low), power(scores[n][2 + c], high));
    }
  }
  return sum_over_heads(f);
}

// Writes the scores of the eight blocks from `block` on; `f` is that of the warp's key `lane`.
__device__ __forceinline__ void write_scores(const BlockScores& out, int64_t row, int block,
                                             float f) {
  const int lane = threadIdx.x % 32;
  float best = fmaxf(f, __shfl_xor_sync(0xffffffffu, f, 1));
  best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
  const float next = __shfl_down_sync(0xffffffffu, f, kFineRows);
  if (lane + kFineRows < 32) best = fmaxf(best, next);
  if (lane % kFineRows == 0) out.scores_of(row)[block + lane / kFineRows] = best;
  if (lane == 0) out.firsts_of(row)[block / kTileBlocks] = f;
}

// Combines the states of the four warps in order: this CTA's part of m and Z of an item's head.
template <typename Config>
__device__ __forceinline__ float2 part_of(ScoreSmem<Config>& smem, int item, int head) {
  float row_max = kMinusInfinity, sum = 0;
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) row_max = fmaxf(row_max, smem.states()[item][w][head].x);
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const float2 state = smem.states()[item][w][head];
    sum = __fmaf_rn(state.y, weight_of(state.x, row_max), sum);
  }
  return make_float2(row_max, sum);
}

// ---- kernels

// Grid: (tiles of 128 keys, Hkv, B * groups of tokens).
template <typename Config, bool kIsFine>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    score_keys_kernel(const __grid_constant__ ScoreArgs<typename Config::Element> args) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim, kN16 = kWarpKeys / 16;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<ScoreSmem<Config>*>(shared);
  ptx::pdl_launch();
  const int lane = threadIdx.x % 32, warp = ptx::uniform_warp();
  const int kv_head = static_cast<int>(blockIdx.y), num_kv_heads = static_cast<int>(gridDim.y);
  const ScoreRange range(args, kIsFine, Config::kKeys);
  if (range.is_empty) {
    ptx::pdl_wait();
    return;
  }
  const int num_head_tiles = (args.group + kHeads - 1) / kHeads;
  const int num_items = (range.end - range.begin) * num_head_tiles;
  // The row of an item in scratch.
  const auto row_of = [&](int item) {
    const int token = range.begin - args.first + item / num_head_tiles;
    return static_cast<int64_t>(token) * num_kv_heads + kv_head;
  };
  const auto position_of = [&](int item) {
    return args.tokens.positions[range.begin + item / num_head_tiles];
  };
  const auto fetch = [&] {
    fetch_keys<Config, kIsFine ? kFineRows : 1>(smem, args, kIsFine ? args.fine : args.coarse,
                                                range);
  };
  if (args.keys_are_old) fetch();
  for (int item = static_cast<int>(threadIdx.x); item < num_items; item += Config::kThreads) {
    const QueryBlocks blocks = blocks_of_query(args.rule, position_of(item));
    smem.key_ends[item] = kIsFine ? blocks.fine_end() : blocks.coarse_end();
  }
  ptx::pdl_wait();
  if (!args.keys_are_old) fetch();
  fetch_queries<Config>(smem, args, range, 0, num_items, num_head_tiles);
  if (kIsFine) {
    for (int i = static_cast<int>(threadIdx.x); i < num_items * kHeads; i += Config::kThreads) {
      const int item = i / kHeads, head = item % num_head_tiles * kHeads + i % kHeads;
      smem.normalisers[item][i % kHeads] =
          args.is_normalised ? args.out.parts_of(row_of(item))[head].x
                             : normaliser_of(args, row_of(item), position_of(item), head);
    }
  }
  ptx::cp_async_wait<1>();
  __syncthreads();
  uint32_t keys[kDim / 16][kN16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
#pragma unroll
    for (int n16 = 0; n16 < kN16; ++n16) {
      load_fragment_keys(keys[k16][n16], smem.keys, warp * kWarpKeys + n16 * 16, k16);
    }
  }

  const int warp_key = range.first_key + warp * kWarpKeys;
  float total = 0;  // fine pass: f of key warp_key + lane over the head tiles so far
#pragma unroll 1
  for (int item = 0; item < num_items; ++item) {
    const int stage = item / Config::kStageItems, at = item % Config::kStageItems;
    if (at == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the queries have arrived; all warps are done with the previous stage
      fetch_queries<Config>(smem, args, range, item + Config::kStageItems, num_items,
                            num_head_tiles);
    }
    auto& queries = smem.queries[stage % Config::kStages][at];
    float scores[1][kWarpKeys / 8][4];
    multiply_keys<T, kDim>(
        scores, [&](uint32_t (&q)[1][4], int k16) { load_fragment_a(q[0], queries, 0, k16); },
        [&](uint32_t (&k)[4], int n16, int k16) {
#pragma unroll
          for (int i = 0; i < 4; ++i) k[i] = keys[k16][n16][i];
        });
    // Key 0 does not exist.
    const uint32_t sees = static_cast<uint32_t>(first_entries(smem.key_ends[item] - warp_key)) &
                          ~(warp_key == 0 ? 1u : 0u);
    if constexpr (kIsFine) {
      const float sum = sum_of_powers(scores[0], smem.normalisers[item], args.scale_log2);
      const int head_tile = item % num_head_tiles;
      total = head_tile == 0 ? sum : __fadd_rn(total, sum);
      if (head_tile + 1 < num_head_tiles) continue;
      const float f = (sees >> lane & 1) != 0 ? fmaxf(total, 0.0f) : 0.0f;  // NaN becomes 0
      write_scores(args.out, row_of(item), warp_key / kFineRows, f);
    } else {
      const uint32_t both[2] = {sees, sees};
      mask_scores(scores[0], both);
      const SoftmaxState state = softmax_of_kv_tile(scores[0], args.scale_log2);
      if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          smem.states()[item][warp][half * 8 + lane / 4] =
              make_float2(state.row_max[half], state.sum[half]);
        }
      }
    }
  }
  if constexpr (!kIsFine) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < num_items * kHeads; i += Config::kThreads) {
      const int item = i / kHeads, head = item % num_head_tiles * kHeads + i % kHeads;
      args.out.parts_of(row_of(item))[blockIdx.x * args.out.num_heads + head] =
          part_of<Config>(smem, item, i % kHeads);
    }
  }
}

}  // namespace
}  // namespace cpmcu::cuda
