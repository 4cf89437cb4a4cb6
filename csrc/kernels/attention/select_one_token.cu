// select_blocks for sequences with one token each: plain decode steps. One launch.
//
// Roofline: the visible compressed keys are read once from HBM. Example: MiniCPM4-8B at 128K
// tokens, 5.2 MB, 1.7 us. Latency dominates.
//
// Schedule: a CTA has 32 blocks of a sequence and KV head: their 128 fine and 32 coarse keys. All
// CTAs run at the same time.
//   before the wait  copy the keys
//   coarse warp      m and Z of its 32 keys, sent to the other CTAs
//   fine warps       multiply; receive m and Z of all keys; scores of the 32 blocks, sent likewise
//   choice           receive all scores; a block is chosen if fewer than `count` come before it
//
// Surprising: each CTA ranks its blocks against all scores. That is 32 comparisons for each score,
// but needs no threshold, no rounds of counting, and no CTA that tells others the result.
//
// The arithmetic is that of select_blocks.cu: parts of a normaliser lie at the same keys.
// select_blocks.cu rescales a sum at each part, this kernel once. Both are exact, since maxima are
// integers (tiles.cuh).
#include "core/dispatch.h"
#include "kernels/attention/block_scores.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kTile = 32;                       // blocks of a CTA, and also its coarse keys
constexpr int kTileFine = kTile * kFineRows;    // fine keys of a CTA
constexpr int kPartTiles = kScorePart / kTile;  // tiles that share one part of m and Z
constexpr int kMaxTiles = kMaxSparseEntries / kPageSize / kTile;

// Messages between the CTAs of a sequence and KV head. Each message has the number of its launch.
// So no launch has to reset them.
struct SelectMessages {
  uint32_t launches;  // number of earlier launches
  uint32_t padding[3];
  uint4 states[kMaxTiles][kHeads];    // m and Z of 32 coarse keys, and the number of the launch
  uint64_t scores[kMaxTiles][kTile];  // low half: score of a block; high half: number of the launch
  uint64_t firsts[kMaxTiles];         // f of the first fine key of a tile
};
static_assert(sizeof(SelectMessages) == kSelectMessageBytes);

template <typename T>
struct SelectOneArgs {
  uint32_t* selection;  // [T, Hkv, num_halves]: halves of 64-bit words, the lower one first
  SelectMessages* messages;
  const T* qkv;
  const T* fine;    // [pages, Hkv, 4, D]
  const T* coarse;  // [pages, Hkv, 1, D]
  float scale_log2;
  int group, qkv_row, q_head;  // the same as in ScoreArgs
  int num_halves;
  bool keys_are_old;
  SparseRule rule;
  StepTokens tokens;
};

template <typename T, int kDim_>
struct SelectOneConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kFineWarps = kTileFine / kWarpKeys, kWarps = kFineWarps + 1;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kCtasPerSm = 2;
};

template <typename Config>
struct SelectOneSmem {
  using T = typename Config::Element;
  union {
    SwizzledTile<T, kTileFine + kTile, Config::kDim> keys;  // fine keys, then coarse ones
    // For each block: the bits of its score + 1; 0: it is no candidate.
    uint32_t ranked[kMaxTiles * kTile];
  };
  SwizzledTile<T, kHeads, Config::kDim> queries;
  union {
    float2 parts[kMaxTiles / kPartTiles][kHeads];  // m and Z of each part
    int before[Config::kWarps][kTile];  // candidates before each block, among those of a warp
  };
  float normalisers[Config::kFineWarps][kHeads];  // m + log2 Z of each head
  float f[kTileFine];

  __device__ __forceinline__ SelectOneSmem() {}
};

// Starts the copy of a tile's keys. Keys that the token does not see become zero.
template <typename Config>
__device__ __forceinline__ void fetch_tile_keys(SelectOneSmem<Config>& smem,
                                                const SelectOneArgs<typename Config::Element>& args,
                                                int slot, int end_block) {
  using T = typename Config::Element;
  constexpr int kChunks = Config::kDim / 8, kStep = Config::kThreads / kChunks;
  constexpr int kCopies = (kTileFine + kTile) / kStep;
  static_assert(kCopies * kStep == kTileFine + kTile);
  const int first = static_cast<int>(threadIdx.x) / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks;
  const int* table = args.tokens.page_table + static_cast<int64_t>(slot) * args.tokens.max_pages;
  const int kv_head = static_cast<int>(blockIdx.y), num_kv_heads = static_cast<int>(gridDim.y);
  const auto block_of = [&](int row) {
    const int at = row < kTileFine ? row / kFineRows : row - kTileFine;
    return static_cast<int>(blockIdx.x) * kTile + at;
  };
  int pages[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int block = block_of(first + i * kStep);
    pages[i] = block < end_block ? table[block] : 0;
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int row = first + i * kStep;
    const int64_t page = int64_t{pages[i]} * num_kv_heads + kv_head;
    const T* from = row < kTileFine
                        ? args.fine + (page * kFineRows + row % kFineRows) * Config::kDim
                        : args.coarse + page * Config::kDim;
    ptx::cp_async16(smem.keys.address(row, c), from + c * 8, block_of(row) < end_block);
  }
  ptx::cp_async_commit();
}

// Multiplies the queries by 32 keys of the tile.
template <typename Config>
__device__ __forceinline__ void multiply_tile_keys(float (&scores)[1][kWarpKeys / 8][4],
                                                   SelectOneSmem<Config>& smem, int first) {
  multiply_keys<typename Config::Element>(
      scores, smem.keys, first,
      [&](uint32_t (&q)[1][4], int k16) { load_fragment_a(q[0], smem.queries, 0, k16); });
}

// Receives the states of all tiles and adds up those of each part, in order.
template <typename Config>
__device__ __forceinline__ void receive_parts(SelectOneSmem<Config>& smem,
                                              const SelectMessages& messages, uint32_t launch,
                                              int num_tiles) {
  constexpr int kTogether = 2;  // parts that one thread reads
  const int num_items = (num_tiles + kPartTiles - 1) / kPartTiles * kHeads;
  for (int first = threadIdx.x; first < num_items; first += kTogether * Config::kThreads) {
    uint4 states[kTogether][kPartTiles];
    bool complete;
    do {
      complete = true;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int item = first + i * Config::kThreads;
#pragma unroll
        for (int t = 0; t < kPartTiles; ++t) {
          const int tile = item / kHeads * kPartTiles + t;
          states[i][t] = make_uint4(__float_as_uint(kMinusInfinity), 0, launch, 0);
          if (item < num_items && tile < num_tiles) {
            states[i][t] = ptx::load_relaxed16(&messages.states[tile][item % kHeads]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int t = 0; t < kPartTiles; ++t) complete = complete && states[i][t].z == launch;
      }
    } while (!complete);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int item = first + i * Config::kThreads;
      if (item >= num_items) continue;
      float row_max = kMinusInfinity, sum = 0;
#pragma unroll
      for (const uint4& state : states[i]) row_max = fmaxf(row_max, __uint_as_float(state.x));
#pragma unroll
      for (const uint4& state : states[i]) {
        const float weight = weight_of(__uint_as_float(state.x), row_max);
        sum = __fmaf_rn(__uint_as_float(state.y), weight, sum);
      }
      smem.parts[item / kHeads][item % kHeads] = make_float2(row_max, sum);
    }
  }
}

// m + log2 Z of a head. Heads that do not exist get infinity, so their f is 0.
template <typename Config>
__device__ __forceinline__ float normaliser_of(const SelectOneSmem<Config>& smem, int num_parts,
                                               int head, int group) {
  if (head >= group) return -kMinusInfinity;
  float row_max = kMinusInfinity, sum = 0;
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) row_max = fmaxf(row_max, smem.parts[i][head].x);
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) {
    const float2 part = smem.parts[i][head];
    sum = __fmaf_rn(part.y, weight_of(part.x, row_max), sum);
  }
  return __fadd_rn(row_max, log2f(sum));
}

// Receives the scores of the blocks [0, num_tiles * kTile). Stores the scores of candidates in
// `ranked`.
template <typename Config>
__device__ __forceinline__ void receive_scores(SelectOneSmem<Config>& smem,
                                               const SelectMessages& messages, uint32_t launch,
                                               const QueryBlocks& blocks, int num_tiles) {
  constexpr int kTogether = 8, kPairs = kTile / 2;
  static_assert(Config::kThreads % kPairs == 0, "a thread has the same pair of each of its tiles");
  const int pair = static_cast<int>(threadIdx.x) % kPairs;
  const auto key_of = [&](int block, uint32_t bits) {
    return block >= blocks.init_end && block < blocks.window_begin ? bits + 1 : 0;
  };
  for (int first = static_cast<int>(threadIdx.x) / kPairs; first < num_tiles;
       first += kTogether * (Config::kThreads / kPairs)) {
    const auto tile_of = [&](int i) { return first + i * (Config::kThreads / kPairs); };
    // The first fine key of the next tile counts for the last block.
    const auto has_next = [&](int i) {
      return pair == kPairs - 1 && (tile_of(i) + 1) * kTile < blocks.coarse_end();
    };
    uint4 messages_of[kTogether];  // messages of two blocks
    uint64_t nexts[kTogether];
    bool complete;
    do {
      complete = true;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        messages_of[i] = make_uint4(0, launch, 0, launch);
        nexts[i] = uint64_t{launch} << 32;
        if (tile_of(i) >= num_tiles) continue;
        messages_of[i] = ptx::load_relaxed16(&messages.scores[tile_of(i)][2 * pair]);
        if (has_next(i)) nexts[i] = ptx::load_relaxed8(&messages.firsts[tile_of(i) + 1]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        complete = complete && messages_of[i].y == launch && messages_of[i].w == launch &&
                   nexts[i] >> 32 == launch;
      }
    } while (!complete);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (tile_of(i) >= num_tiles) continue;
      const int block = tile_of(i) * kTile + 2 * pair;
      const uint32_t last = ::max(messages_of[i].z, static_cast<uint32_t>(nexts[i]));
      *reinterpret_cast<uint2*>(&smem.ranked[block]) =
          make_uint2(key_of(block, messages_of[i].x), key_of(block + 1, last));
    }
  }
}

// The number of candidates in the warp's share of the tiles that come before block `lane` of this
// CTA's tile. A candidate comes before if its score is higher, or equal and its number lower.
template <typename Config>
__device__ __forceinline__ int count_before(const SelectOneSmem<Config>& smem, int num_tiles) {
  const int lane = threadIdx.x % 32, own_tile = static_cast<int>(blockIdx.x);
  const uint32_t own = smem.ranked[own_tile * kTile + lane];
  int counts[4] = {};
#pragma unroll 1
  for (int tile = static_cast<int>(threadIdx.x) / 32; tile < num_tiles; tile += Config::kWarps) {
    const auto* keys = reinterpret_cast<const uint4*>(&smem.ranked[tile * kTile]);
    // A key above the limit counts. An equal key counts only in lower tiles. A candidate's key is
    // not 0.
    const uint32_t limit = tile < own_tile ? own - 1 : own;
    if (tile != own_tile) {
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const uint4 key = keys[i];
        counts[0] += key.x > limit ? 1 : 0;
        counts[1] += key.y > limit ? 1 : 0;
        counts[2] += key.z > limit ? 1 : 0;
        counts[3] += key.w > limit ? 1 : 0;
      }
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kTile; ++i) {
      const uint32_t key = smem.ranked[tile * kTile + i];
      counts[0] += key > own || (key == own && i < lane) ? 1 : 0;
    }
  }
  return counts[0] + counts[1] + counts[2] + counts[3];
}

// ---- kernels

// Grid: (tiles of 32 blocks, Hkv, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    select_one_token_kernel(const __grid_constant__ SelectOneArgs<typename Config::Element> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<SelectOneSmem<Config>*>(shared);
  ptx::pdl_launch();
  const int lane = threadIdx.x % 32, warp = ptx::uniform_warp();
  const int tile = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y);
  const int seq = static_cast<int>(blockIdx.z), num_kv_heads = static_cast<int>(gridDim.y);
  const int token = args.tokens.seq_token_begin[seq], slot = args.tokens.seq_slots[seq];
  const QueryBlocks blocks = blocks_of_query(args.rule, args.tokens.positions[token]);
  const int num_tiles = blocks.needs_scores() ? (blocks.coarse_end() + kTile - 1) / kTile : 0;
  const bool is_scored = tile < num_tiles;
  if (is_scored && args.keys_are_old) {
    fetch_tile_keys<Config>(smem, args, slot, blocks.coarse_end());
  }
  ptx::pdl_wait();

  const int block = tile * kTile + lane;
  const bool is_between = block >= blocks.init_end && block < blocks.window_begin;
  bool chosen = is_between ? !blocks.needs_scores() && blocks.count > 0 : block <= blocks.own;
  // Tiles with candidates.
  const int num_ranked = is_scored ? (blocks.window_begin + kTile - 1) / kTile : 0;
  if (is_scored) {
    SelectMessages& messages = args.messages[seq * num_kv_heads + kv_head];
    if (!args.keys_are_old) fetch_tile_keys<Config>(smem, args, slot, blocks.coarse_end());
    if (warp < Config::kFineWarps) {
      const auto* q = args.qkv + static_cast<int64_t>(token) * args.qkv_row +
                      static_cast<int64_t>(kv_head) * args.group * args.q_head;
      fetch_tile<Config::kFineWarps * 32>(smem.queries, q, args.q_head, args.group);
    }
    ptx::cp_async_commit();
    const uint32_t launch = __ldcg(&messages.launches) + 1;
    ptx::cp_async_wait<0>();
    __syncthreads();

    float scores[1][kWarpKeys / 8][4];
    multiply_tile_keys<Config>(scores, smem, warp * kWarpKeys);
    if (warp == Config::kFineWarps) {
      // Key 0 does not exist.
      const uint32_t sees =
          static_cast<uint32_t>(first_entries(blocks.coarse_end() - tile * kTile)) &
          ~(tile == 0 ? 1u : 0u);
      const uint32_t both[2] = {sees, sees};
      mask_scores(scores[0], both);
      const SoftmaxState state = softmax_of_kv_tile(scores[0], args.scale_log2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane % 4 != 0) continue;
        ptx::store_relaxed16(&messages.states[tile][half * 8 + lane / 4],
                             {state.row_max[half], state.sum[half], __uint_as_float(launch), 0});
      }
    }
    receive_parts<Config>(smem, messages, launch, num_tiles);
    __syncthreads();
    // All CTAs that send messages have sent one by now, and each read `launches` before. So it may
    // change.
    if (tile == 0 && threadIdx.x == 0) messages.launches = launch;
    if (warp < Config::kFineWarps) {
      if (lane < kHeads) {
        const int num_parts = (num_tiles + kPartTiles - 1) / kPartTiles;
        smem.normalisers[warp][lane] = normaliser_of(smem, num_parts, lane, args.group);
      }
      __syncwarp();
      const int key = tile * kTileFine + warp * kWarpKeys;
      const uint32_t sees =
          static_cast<uint32_t>(first_entries(blocks.fine_end() - key)) & ~(key == 0 ? 1u : 0u);
      const float sum = sum_of_powers(scores[0], smem.normalisers[warp], args.scale_log2);
      smem.f[warp * kWarpKeys + lane] =
          (sees >> lane & 1) != 0 ? fmaxf(sum, 0.0f) : 0.0f;  // NaN becomes 0
    }
    __syncthreads();
    if (warp == 0) {
      float best = 0;
#pragma unroll
      for (int i = 0; i <= kFineRows; ++i) {
        if (lane * kFineRows + i < kTileFine) best = fmaxf(best, smem.f[lane * kFineRows + i]);
      }
      ptx::store_relaxed8(&messages.scores[tile][lane],
                          uint64_t{launch} << 32 | __float_as_uint(best));
    } else if (threadIdx.x == 32) {
      ptx::store_relaxed8(&messages.firsts[tile],
                          uint64_t{launch} << 32 | __float_as_uint(smem.f[0]));
    }
    if (tile < num_ranked) {
      receive_scores<Config>(smem, messages, launch, blocks, num_ranked);
      __syncthreads();
      smem.before[warp][lane] = count_before<Config>(smem, num_ranked);
      __syncthreads();
      int before = 0;
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w) before += smem.before[w][lane];
      if (is_between) chosen = before < blocks.count;
    }
  }
  const uint32_t word = __ballot_sync(0xffffffffu, chosen);
  if (threadIdx.x != 0) return;
  uint32_t* const to =
      args.selection + (static_cast<int64_t>(token) * num_kv_heads + kv_head) * args.num_halves;
  to[tile] = word;
  // Words beyond max_kv become zero.
  for (int half = tile + static_cast<int>(gridDim.x); half < args.num_halves; half += gridDim.x) {
    to[half] = 0;
  }
}

// ---- launchers

template <typename T, int kDim>
void launch_select_one_token(const Context& ctx, const SelectBlocksParams& p, dim3 grid) {
  using Config = SelectOneConfig<T, kDim>;
  using Smem = SelectOneSmem<Config>;
  static_assert(Config::kCtasPerSm * (sizeof(Smem) + 1024) <= 100 * 1024,
                "sm_86 and sm_89 have 100 KiB");
  constexpr float kLog2E = 1.44269504088896340736f;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  const auto kernel = select_one_token_kernel<Config>;
  allow_shared_bytes(kernel, sizeof(Smem));
  launch(ctx, kernel, grid, Config::kThreads, sizeof(Smem),
         SelectOneArgs<T>{.selection = p.selection.as<uint32_t>(),
                          .messages = p.memory.as<SelectMessages>(),
                          .qkv = p.qkv.as<const T>(),
                          .fine = p.keys.fine.as<const T>(),
                          .coarse = p.keys.coarse.as<const T>(),
                          .scale_log2 = p.scale * kLog2E,
                          .group = p.num_heads / p.num_kv_heads,
                          .qkv_row = layout.row,
                          .q_head = layout.q_head,
                          .num_halves = 2 * static_cast<int>(p.selection.size(2)),
                          .keys_are_old = p.keys_are_old,
                          .rule = p.rule,
                          .tokens = p.tokens});
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, page_table.
bool select_one_token(const Context& ctx, const SelectBlocksParams& p) {
  const int num_seqs = p.tokens.num_seqs, rows = num_seqs * p.num_kv_heads;
  const int num_tiles = static_cast<int>(selection_words(p.tokens.max_kv)) * 64 / kTile;
  // All CTAs run at the same time, since they wait for each other. With more than half as many CTAs
  // as SMs, a step got slower: 2.71 ms, not 2.61, at 131072 entries of MiniCPM4-8B. Messages of 16
  // bytes that arrive as a whole were tested on Hopper only.
  const bool fits =
      ctx.code_capability >= 90 && !ctx.is_shared && p.tokens.num_tokens == num_seqs &&
      p.tokens.max_seq_tokens == 1 && p.num_heads <= kHeads * p.num_kv_heads &&
      num_tiles * rows <= ctx.sm_count / 2 && p.memory.num_bytes() >= rows * kSelectMessageBytes;
  if (!fits) return false;
  dispatch_half(p.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("select_blocks: head_dim", p.head_dim, [&](auto dim) {
      launch_select_one_token<decltype(element), dim.value>(
          ctx, p, dim3(num_tiles, p.num_kv_heads, num_seqs));
    });
  });
  return true;
}

}  // namespace cpmcu::cuda
