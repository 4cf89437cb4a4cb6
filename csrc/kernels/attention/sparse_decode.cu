// attention_decode with a selection: the splits of trees and of several tokens of a sequence.
// sparse_one_token.cu serves plain decode steps.
//
// Roofline: the chosen blocks are read once from HBM for all tokens of a step, 256 * D bytes each
// (128 * (D + 4) of an fp8 cache). Other CTAs of the same KV head find them in L2. Each token and
// head writes D + 2 floats for two of its blocks. Example: 32 tokens that choose the same blocks of
// MiniCPM4-8B, 6.3 MB of keys and values, 25 MB of partial results, 3.2 GFLOP.
//
// Schedule: a CTA has 64 packed rows of a KV head, as in many_rows.cuh, and a range of splits.
//   1. Each token of the CTA takes a range of its own splits. The CTA lists the union of the blocks
//      in these ranges.
//   2. It copies one listed block at a time, the next one while it multiplies. A row that did not
//      choose the block is masked. If several tokens chose it, four warps multiply it by wgmma on
//      Hopper, except with an fp8 cache; otherwise each warp with such a row by mma.sync.
//   3. A row with a complete split writes partial results, and begins the next split.
//   Entries of a verified tree are taken as in many_rows.cuh.
//
// Surprising: splits are counted in a token's own list of blocks, so they do not depend on the
// other tokens. Ranges are equally long although the chosen blocks are scattered. Tokens that chose
// the same blocks have the same ranges, so no block is read twice. A masked block changes no bit.
#include <algorithm>

#include "kernels/attention/many_rows_steps.cuh"
#include "kernels/attention/selected_splits.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_>
struct SparseConfig : ManyRowsConfig<T, kDim_, kFp8_> {
  static constexpr int kStages = 2;
  static constexpr bool kMerges = false;
  static_assert(ManyRowsConfig<T, kDim_, kFp8_>::kStageEntries == kPageSize,
                "a stage tile is a block");
  static_assert(ManyRowsConfig<T, kDim_, kFp8_>::kTreeTiles <= kStages,
                "the tree must fit the stages");
};

// A token's blocks in the CTA's range.
struct TokenRange {
  int split;  // number of the first split
  int count;  // number of blocks
};

// Followed by the words of the CTA's tokens, without blocks outside their ranges, and by the list.
template <typename Config>
struct SparseSmem {
  ManyRowsSmem<Config> rows;
  TokenRange ranges[Config::kRows];  // ranges of the CTA's tokens
  // Numbers of listed blocks, and of listed blocks that end before the tree.
  int num_listed, num_shared;

  __device__ __forceinline__ uint64_t* words() { return reinterpret_cast<uint64_t*>(this + 1); }
  // Blocks in ascending order, some with the bit kSharedBlock.
  __device__ __forceinline__ uint16_t* list(int num_words) {
    return reinterpret_cast<uint16_t*>(words() + num_words);
  }
  static constexpr size_t bytes(int num_tokens, int num_words) {
    return sizeof(SparseSmem) + num_words * (num_tokens * sizeof(uint64_t) + 64 * sizeof(uint16_t));
  }
};

// Bit of a block that two tokens chose, or one token that has half of the rows.
constexpr int kSharedBlock = 0x8000;
static_assert(kMaxWords * 64 <= kSharedBlock);

// The tokens of a chunk of packed rows.
template <typename Config>
__host__ __device__ constexpr int most_tokens(int group) {
  const int most = (Config::kRows + group - 2) / group + 1;
  return most < Config::kRows ? most : Config::kRows;
}

// Leaves the blocks of the CTA's range in the words of each token. A warp has every fourth token.
template <typename Config>
__device__ __forceinline__ void keep_ranges(SparseSmem<Config>& smem, int num_tokens, int num_words,
                                            int warp, int lane) {
  const int range = split_range_index(), num_ranges = static_cast<int>(gridDim.y);
  for (int token = warp; token < num_tokens; token += Config::kWarps) {
    uint64_t* const words = smem.words() + token * num_words;
    LaneWords selected(words, num_words);
    const int num_splits = selected.num_splits();
    const int split = range * num_splits / num_ranges;
    const int first = kSplitBlocks * split;
    const int end = min(kSplitBlocks * ((range + 1) * num_splits / num_ranges), selected.count);
    selected.keep(first, end);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < num_words) words[2 * lane + i] = selected.words[i];
    }
    if (lane == 0) smem.ranges[token] = {split, end - first};
  }
}

// Lists the union of the words of the CTA's tokens. One warp.
template <typename Config>
__device__ __forceinline__ void list_blocks(SparseSmem<Config>& smem, int num_tokens, int num_words,
                                            int group, int tree_block, int lane) {
  uint64_t any[2] = {}, shared[2] = {};
  // If false, one token has at least half of the rows.
  const bool two_share = 2 * group < Config::kRows;
  for (int token = 0; token < num_tokens; ++token) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i >= num_words) continue;
      const uint64_t word = smem.words()[token * num_words + 2 * lane + i];
      shared[i] |= two_share ? any[i] & word : word;
      any[i] |= word;
    }
  }
  int until = __popcll(any[0]) + __popcll(any[1]);
  const int mine = until;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, until, offset);
    if (lane >= offset) until += lower;
  }
  uint16_t* to = smem.list(num_tokens * num_words) + until - mine;
  int before_tree = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (uint64_t rest = any[i]; rest != 0; rest &= rest - 1) {
      const int place = __ffsll(static_cast<long long>(rest)) - 1;
      const int block = (2 * lane + i) * 64 + place;
      *to++ = static_cast<uint16_t>(block | ((shared[i] >> place & 1) != 0 ? kSharedBlock : 0));
      before_tree += block < tree_block;
    }
  }
  before_tree = __reduce_add_sync(0xffffffffu, before_tree);
  if (lane == 31) smem.num_listed = until, smem.num_shared = before_tree;
}

// The two packed rows of a lane.
struct LaneRows {
  const uint64_t* words[2];  // chosen blocks as bits; null: the row does not exist
  int own[2];                // position of the row's token
  int split[2];              // number of the split that is being summed
  int left[2];               // number of blocks of the range that follow
  int odd[2];                // 1: the last split of the range has one block

  template <typename Config>
  __device__ __forceinline__ void load(SparseSmem<Config>& smem, int first_token, int num_words,
                                       int warp_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp_row + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      const bool exists = smem.rows.packed.queries[p] >= 0;
      const int token = exists ? smem.rows.chunk.token_of(p) - first_token : 0;
      words[half] = exists ? smem.words() + token * num_words : nullptr;
      split[half] = smem.ranges[token].split;
      left[half] = smem.ranges[token].count;
      odd[half] = left[half] % kSplitBlocks;
    }
  }
  __device__ __forceinline__ bool sees(int half, int block) const {
    return words[half] != nullptr && has_block(words[half], block);
  }
};

// Masks the scores of a block's entries. Bit i of sees[half]: the row sees entry i of the block.
template <int kKvTiles>
__device__ __forceinline__ void hide(float (&scores)[kKvTiles][1][kKvTileN8][4],
                                     const uint64_t (&sees)[2], int first_tile) {
  if (__all_sync(0xffffffffu, (sees[0] & sees[1]) == ~uint64_t{0})) return;
#pragma unroll
  for (int i = 0; i < kKvTiles; ++i) {
    const int first = (first_tile + i) * kKvTile;
    const uint32_t tile_sees[2] = {static_cast<uint32_t>(sees[0] >> first),
                                   static_cast<uint32_t>(sees[1] >> first)};
    mask_scores(scores[i][0], tile_sees);
  }
}

// Adds a block's stage tile to the states of a warp's rows.
template <typename Config>
__device__ __forceinline__ void attend_block(RowTile<Config::kColumns>& state,
                                             typename ManyRowsSmem<Config>::Stage& stage,
                                             const LaneRows& rows,
                                             const uint32_t (&queries)[Config::kDim / 16][4],
                                             float scale_log2, int block, bool is_shared) {
  using T = typename Config::Element;
  uint64_t sees[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int num_entries = rows.own[half] + 1 - block * kPageSize;
    sees[half] = rows.sees(half, block) ? first_entries(num_entries) : 0;
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (!Config::kFp8) {
    if (is_shared) {
      add_tile<T>(state, stage.keys, stage.values, queries, scale_log2,
                  [&](auto& scores) { hide(scores, sees, 0); });
      return;
    }
  }
#endif
  if (!__any_sync(0xffffffffu, (sees[0] | sees[1]) != 0)) return;
#pragma unroll 1
  for (int kv_tile = 0; kv_tile < kPageSize / kKvTile; ++kv_tile) {
    float scores[1][1][kKvTileN8][4];
    multiply_keys<T>(scores[0], stage.keys, kv_tile * kKvTile, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
    });
    scale_columns<T>(scores[0][0], stage.keys, kv_tile * kKvTile);
    hide(scores, sees, kv_tile);
    add_kv_tile<T>(
        state, scores[0][0], scale_log2, 0, values_from(stage.values, kv_tile * kKvTile),
        [&](float (&p)[kKvTileN8][4]) { scale_columns<T>(p, stage.values, kv_tile * kKvTile); });
  }
}

// Adds a KV tile of the tree for the rows that have its block: entries before the tree, then the
// ancestors of one token after the other, in order.
template <typename Config>
__device__ __forceinline__ void attend_tree_tile(
    RowTile<Config::kColumns>& state, SparseSmem<Config>& smem,
    const AttentionArgs<typename Config::Element>& args, const LaneRows& rows,
    const uint32_t (&queries)[Config::kDim / 16][4], int warp, int lane, int entry,
    int first_stage) {
  constexpr int kStageEntries = Config::kStageEntries;
  const int warp_row = warp * kWarpRows, block = entry / kPageSize;
  const int length = smem.rows.chunk.seq.length;
  const int tree_entry = length / kStageEntries * kStageEntries;
  const bool chose[2] = {rows.sees(0, block), rows.sees(1, block)};
  if (!__any_sync(0xffffffffu, chose[0] || chose[1])) return;
  for_each_tree_token<Config>(smem.rows, warp_row, entry, [&](int p) {
    const AncestorEntries<Config> entries(
        smem.rows, smem.rows.paths[warp], lane, entry, p, length, [&](int from, auto use) {
          const int tile = (from - tree_entry) / kStageEntries;
          use(smem.rows.stages[(first_stage + tile) % 2], (from - tree_entry) % kStageEntries);
        });
    attend_ancestors<Config>(state, entries, smem.rows, args, queries, lane, entry, p, warp_row, 0,
                             entry + kKvTile <= length, [&](uint32_t (&sees)[2]) {
#pragma unroll
                               for (int half = 0; half < 2; ++half) {
                                 sees[half] = chose[half] ? sees[half] : 0;
                               }
                             });
  });
}

// Counts a block of the rows that have it. A row with a complete split writes its state and begins
// the next split.
template <typename Config>
__device__ __forceinline__ void end_block(const AttentionArgs<typename Config::Element>& args,
                                          const PackedRows<Config::kRows>& packed,
                                          RowTile<Config::kColumns>& state, LaneRows& rows,
                                          int warp_row, int block, int max_splits) {
  const int lane = threadIdx.x % 32;
  const Partials all(args.scratch, max_splits, args.tokens.num_tokens * args.num_heads,
                     Config::kDim);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rows.sees(half, block)) continue;
    const int left = --rows.left[half];
    if (left != 0 && left % kSplitBlocks != rows.odd[half]) continue;
    const int split = rows.split[half]++;
    if (split < max_splits) {
      const int64_t index = split * all.num_rows + packed.outs[warp_row + half * 8 + lane / 4];
      float* to = all.acc + index * Config::kDim + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; n += 2) {
        *reinterpret_cast<float4*>(to + n * 8) =
            make_float4(state.acc[n][2 * half], state.acc[n][2 * half + 1],
                        state.acc[n + 1][2 * half], state.acc[n + 1][2 * half + 1]);
      }
      if (lane % 4 == 0) all.states[index] = make_float2(state.row_max[half], state.sum[half]);
    }
    state.row_max[half] = kMinusInfinity, state.sum[half] = 0;
#pragma unroll
    for (int n = 0; n < Config::kColumns / 8; ++n) {
      state.acc[n][2 * half] = state.acc[n][2 * half + 1] = 0;
    }
  }
}

// ---- kernels

// Grid: (chunks of packed rows * KV heads, ranges of splits, B).
template <typename Config, bool kIsTree>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sparse_decode_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                         int num_chunks, int max_splits) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<SparseSmem<Config>*>(shared);
  ptx::pdl_launch();
  const Chunk chunk(args, num_chunks, Config::kRows);
  if (chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }
  const int lane = threadIdx.x % 32, warp = ptx::uniform_warp(), warp_row = warp * kWarpRows;
  const int first_token = chunk.token_of(0), num_words = args.selection_words;
  const int num_tokens =
      min(chunk.token_of(Config::kRows - 1) + 1, chunk.seq.num_tokens) - first_token;
  smem.rows.packed.template load<kIsTree, kDim>(args, chunk);
  if (threadIdx.x == 0) smem.rows.chunk = chunk;
  LaneRows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = chunk.token_of(warp_row + half * 8 + lane / 4);
    rows.own[half] =
        args.tokens.positions[chunk.seq.token_begin + min(token, chunk.seq.num_tokens - 1)];
  }
  __syncthreads();
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
  queries_copy.look_up(smem.rows.packed);
  ptx::pdl_wait();
  queries_copy.start(smem.rows.queries(), args.qkv);
  ptx::cp_async_commit();
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * num_words; i += Config::kThreads) {
    const int token = i / num_words;
    smem.words()[i] = selection_of(args, chunk.seq.token_begin + first_token + token,
                                   chunk.kv_head)[i - token * num_words];
  }
  __syncthreads();
  keep_ranges<Config>(smem, num_tokens, num_words, warp, lane);
  ptx::cp_async_wait<0>();
  __syncthreads();
  const int tree_block = kIsTree ? chunk.seq.length / kPageSize : kMaxWords * 64;
  if (warp == 0) list_blocks<Config>(smem, num_tokens, num_words, chunk.group, tree_block, lane);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    load_fragment_a(queries[k16], smem.rows.queries(), warp_row, k16);
  }
  rows.load(smem, first_token, num_words, warp_row);
  __syncthreads();  // blocks replace the queries

  const int num_listed = smem.num_listed, num_shared = smem.num_shared;
  const uint16_t* const list = smem.list(num_tokens * num_words);
  const auto block_at = [&](int i) { return list[i] % kSharedBlock; };
  const auto page_at = [&](int i) {
    return i < num_shared ? page_of(args.tokens, chunk.seq.slot, block_at(i) * kPageSize) : 0;
  };
  const auto fetch = [&](int stage, int block, int page) {
    fetch_stage<Config>(smem.rows.stages[stage], args, chunk.seq, chunk.kv_head, block * kPageSize,
                        page);
  };
  // Block i of the tree's entries. The tree may end in its first block.
  const auto fetch_tree = [&](int stage, int i) {
    const int entry = (tree_block + i) * kPageSize;
    if (entry < chunk.seq.end()) {
      fetch(stage, tree_block + i, page_of(args.tokens, chunk.seq.slot, entry));
    }
  };
  RowTile<Config::kColumns> state;
  state.clear();
  const auto end_row_splits = [&](int block) {
    end_block<Config>(args, smem.rows.packed, state, rows, warp_row, block, max_splits);
  };

  int next_page = page_at(1);
  if (num_shared > 0) {
    fetch(0, block_at(0), page_at(0));
  } else if (kIsTree && num_listed > 0) {
    fetch_tree(0, 0);
  }
  ptx::cp_async_commit();
#pragma unroll 1
  for (int i = 0; i < num_shared; ++i) {
    const int entry = list[i], block = entry % kSharedBlock;
    ptx::cp_async_wait<0>();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    ptx::shared_copy_fence();
#endif
    __syncthreads();  // the block has arrived; all warps are done with the previous one
    if (i + 1 < num_shared) {
      fetch((i + 1) % 2, block_at(i + 1), next_page);
    } else if (kIsTree && num_listed > num_shared) {
      fetch_tree((i + 1) % 2, 0);
    }
    ptx::cp_async_commit();
    next_page = page_at(i + 2);
    attend_block<Config>(state, smem.rows.stages[i % 2], rows, queries, args.scale_log2, block,
                         entry >= kSharedBlock);
    end_row_splits(block);
  }
  if (kIsTree && num_listed > num_shared) {
    __syncthreads();
    fetch_tree((num_shared + 1) % 2, 1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = num_shared; i < num_listed; ++i) {
      const int block = block_at(i);
      for (int tile = 0; tile < kPageSize / kKvTile; ++tile) {
        attend_tree_tile<Config>(state, smem, args, rows, queries, warp, lane,
                                 block * kPageSize + tile * kKvTile, num_shared);
      }
      end_row_splits(block);
    }
  }
}

// ---- launchers

template <typename Config, bool kIsTree>
void launch_decode(const Context& ctx, const AttentionParams& params) {
  using Smem = SparseSmem<Config>;
  const StepTokens& tokens = params.tokens;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_words = static_cast<int>(params.selection.words.size(2));
  const size_t bytes =
      Smem::bytes(std::min(most_tokens<Config>(group), tokens.max_seq_tokens), num_words);
  static_assert(Smem::bytes(most_tokens<Config>(2), kMaxWords) <= 99 * 1024,
                "sm_86 and sm_89 have 99 KiB for a CTA");
  CHECK(bytes <= static_cast<size_t>(ctx.sm_shared_bytes) - 1024,
        "attention with a selection: sequences of up to {} tokens with {} query heads of a KV head "
        "need {} bytes of shared memory, expected at most {}",
        tokens.max_kv, group, bytes, ctx.sm_shared_bytes - 1024);
  const int num_chunks = (tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
  const int ctas_per_range = num_chunks * params.num_kv_heads * tokens.num_seqs;
  const int num_ranges = std::clamp(Config::kCtasPerSm * ctx.sm_count / ctas_per_range, 1,
                                    params.selection.max_splits);
  const auto kernel = sparse_decode_kernel<Config, kIsTree>;
  allow_shared_bytes(kernel, bytes);
  launch(ctx, kernel, dim3(num_chunks * params.num_kv_heads, num_ranges, tokens.num_seqs),
         Config::kThreads, bytes, make_args<typename Config::Element>(params), num_chunks,
         params.selection.max_splits);
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, slot_lengths,
// ancestor_masks, page_table, selection.
void sparse_decode(const Context& ctx, const AttentionParams& params) {
  const int64_t needed = sparse_scratch_floats(params.tokens.num_tokens, params.num_heads,
                                               params.head_dim, params.selection.max_splits);
  CHECK(params.selection.max_splits > 0 && params.scratch.dtype() == DType::kF32 &&
            params.scratch.num_elements() >= needed,
        "attention_decode: scratch is {} {}, expected {} elements of float32 for {} splits",
        params.scratch.shape_text(), name_of(params.scratch.dtype()), needed,
        params.selection.max_splits);
  check_selected(params);
  const bool one_token = !params.by_position && params.tokens.max_seq_tokens == 1;
  if (one_token && params.num_heads / params.num_kv_heads <= kWarpRows) {
    return sparse_one_token(ctx, params);
  }
  dispatch_selected(params, [&](auto element, auto dim, auto is_fp8) {
    using Config = SparseConfig<decltype(element), dim.value, is_fp8.value>;
    params.by_position ? launch_decode<Config, true>(ctx, params)
                       : launch_decode<Config, false>(ctx, params);
  });
}

}  // namespace cpmcu::cuda
