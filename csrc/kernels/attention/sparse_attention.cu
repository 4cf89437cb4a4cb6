// Attention to the blocks that select_blocks chose: decode steps, trees and prompts.
//
//   out[t, h] = softmax(scale * q[t, h] K^T) V over the blocks of (t, h / group)
//
// Roofline: the chosen blocks are read once from HBM for all tokens of a step, 256 * D bytes each.
// Other CTAs of the same KV head find them in L2.
//
// Schedule: a CTA has 64 packed rows of a KV head, as in many_rows.cuh, and 16 of them in each of
// four warps.
//   1. It computes the union of its tokens' blocks. In a decode step it takes its part of the
//      union's splits (a split is two blocks).
//   2. It copies one block at a time, the next one while it multiplies. A row that did not choose
//      the block is masked; a warp without such a row skips it.
//   3. Decode: at the end of a split, a row with a block in it writes partial results under the
//      number of the split among its own. Prefill: one state for all blocks, then `out`.
//   Entries of a verified tree are taken as in many_rows.cuh; every token sees their blocks.
//
// Surprising: splits lie at fixed absolute entries, so they do not depend on the union. A masked
// block changes no bit. So a token has the same bits in any tree, and without a choice (below
// dense_len) those of dense attention.
#include <algorithm>

#include "core/dispatch.h"
#include "kernels/attention/many_rows_steps.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/attention/sparse_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kBlocks = 2;  // of a split

enum class Mode { kChain, kTree, kPrefill };

template <typename T, int kDim_>
struct SparseConfig : ManyRowsConfig<T, kDim_> {
  static constexpr int kStages = 2;
  static constexpr bool kMerges = false;
  static_assert(ManyRowsConfig<T, kDim_>::kStageEntries == kPageSize, "a stage tile is a block");
  static_assert(ManyRowsConfig<T, kDim_>::kTreeTiles <= kStages, "the tree must fit the stages");
};

template <typename Config>
struct SparseSmem {
  ManyRowsSmem<Config> rows;
  uint64_t any[kMaxWords];  // union of the tokens' blocks
};

// The two packed rows of a lane, their selections, and the number of their next split.
struct LaneRows {
  const uint64_t* words[2];  // null: the row does not exist
  int own[2];                // position
  int next_split[2];

  template <typename Config>
  __device__ __forceinline__ LaneRows(const AttentionArgs<typename Config::Element>& args,
                                      const ManyRowsSmem<Config>& smem, int warp_row,
                                      int first_position) {
    const Chunk& chunk = smem.chunk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp_row + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      const int row = chunk.seq.token_begin + chunk.token_of(p);
      const bool exists =
          smem.packed.queries[p] >= 0 && args.tokens.positions[row] >= first_position;
      own[half] = exists ? args.tokens.positions[row] : -1;
      words[half] = exists ? selection_of(args, row, chunk.kv_head) : nullptr;
      next_split[half] = 0;
    }
  }
  __device__ __forceinline__ bool sees(int half, int block) const {
    return words[half] != nullptr && has_block(words[half], block);
  }
};

// Adds a block's stage tile to the states of a warp's rows.
template <typename Config>
__device__ __forceinline__ void attend_block(RowTile<Config::kColumns>& state,
                                             typename ManyRowsSmem<Config>::Stage& stage,
                                             const LaneRows& rows,
                                             const uint32_t (&queries)[Config::kDim / 16][4],
                                             float scale_log2, int block) {
  using T = typename Config::Element;
  uint64_t sees[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int num_entries = rows.own[half] + 1 - block * kPageSize;
    sees[half] = rows.sees(half, block) ? first_entries(num_entries) : 0;
  }
  if (!__any_sync(0xffffffffu, (sees[0] | sees[1]) != 0)) return;
#pragma unroll
  for (int kv_tile = 0; kv_tile < kPageSize / kKvTile; ++kv_tile) {
    float scores[1][kKvTileN8][4];
    multiply_keys<T>(scores, stage.keys, kv_tile * kKvTile, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
    });
    const uint32_t tile_sees[2] = {static_cast<uint32_t>(sees[0] >> kv_tile * kKvTile),
                                   static_cast<uint32_t>(sees[1] >> kv_tile * kKvTile)};
    mask_scores(scores[0], tile_sees);
    add_kv_tile<T>(state, scores[0], scale_log2, 0, [&](uint32_t (&v)[4], int k16, int n16) {
      load_fragment_values(v, stage.values, kv_tile * kKvTile + k16 * 16, n16);
    });
  }
}

// Writes the states of rows with a block in the split that begins with `block`.
template <typename Config>
__device__ __forceinline__ void write_selected(const AttentionArgs<typename Config::Element>& args,
                                               const PackedRows<Config::kRows>& packed,
                                               const RowTile<Config::kColumns>& state,
                                               LaneRows& rows, int warp_row, int block,
                                               int max_splits) {
  const int lane = threadIdx.x % 32;
  const Partials all(args.scratch, max_splits, args.tokens.num_tokens * args.num_heads,
                     Config::kDim);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rows.sees(half, block) && !rows.sees(half, block + 1)) continue;
    const int split = rows.next_split[half]++;
    if (split >= max_splits) continue;
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
}

// Writes the results of rows whose state has all blocks.
template <typename Config>
__device__ __forceinline__ void write_out(const AttentionArgs<typename Config::Element>& args,
                                          const PackedRows<Config::kRows>& packed,
                                          const RowTile<Config::kColumns>& state,
                                          const LaneRows& rows, int warp_row) {
  using T = typename Config::Element;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.words[half] == nullptr) continue;
    const float inverse = inverse_of(state.sum[half]);
    const int64_t out = packed.outs[warp_row + half * 8 + lane / 4];
    T* to = args.out + out * Config::kDim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Config::kColumns / 8; ++n) {
      *reinterpret_cast<uint32_t*>(to + n * 8) =
          pack2<T>(normalised(state.acc[n][2 * half], inverse),
                   normalised(state.acc[n][2 * half + 1], inverse));
    }
  }
}

// The union of the blocks of the chunk's tokens at positions from `first_position` on.
template <typename Config>
__device__ __forceinline__ void unite(SparseSmem<Config>& smem,
                                      const AttentionArgs<typename Config::Element>& args,
                                      const Chunk& chunk, int first_position) {
  const int begin = chunk.token_of(0);
  const int end = min(chunk.token_of(Config::kRows - 1) + 1, chunk.seq.num_tokens);
  for (int w = threadIdx.x; w < args.selection_words; w += Config::kThreads) {
    uint64_t any = 0;
    for (int token = begin; token < end; ++token) {
      const int row = chunk.seq.token_begin + token;
      if (args.tokens.positions[row] < first_position) continue;
      any |= selection_of(args, row, chunk.kv_head)[w];
    }
    smem.any[w] = any;
  }
}

// ---- kernels

// Grid: (chunks of packed rows * KV heads, ranges of splits, B).
template <typename Config, Mode kMode>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sparse_attention_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                            int num_chunks, int max_splits, int first_position) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<SparseSmem<Config>*>(shared);
  ptx::pdl_launch();
  ptx::pdl_wait();
  const Chunk chunk(args, num_chunks, Config::kRows);
  if (chunk.first >= chunk.num_packed) return;
  unite<Config>(smem, args, chunk, first_position);
  smem.rows.packed.template load<kMode == Mode::kTree, kDim>(args, chunk);
  if (threadIdx.x == 0) smem.rows.chunk = chunk;
  __syncthreads();

  const int num_words = args.selection_words;
  const int num_splits = count_splits(smem.any, num_words);
  const int range = blockIdx.y, num_ranges = gridDim.y;
  const int first_split = range * num_splits / num_ranges;
  const int end_split = (range + 1) * num_splits / num_ranges;
  if (first_split >= end_split) return;
  const int begin = find_split(smem.any, num_words, first_split);
  const int end = find_split(smem.any, num_words, end_split);

  const int lane = threadIdx.x % 32, warp = ptx::uniform_warp();
  const int warp_row = warp * kWarpRows;
  const bool warp_has_rows = chunk.first + warp_row < chunk.num_packed;
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
  queries_copy.look_up(smem.rows.packed);
  queries_copy.start(smem.rows.queries(), args.qkv);
  ptx::cp_async_commit();
  LaneRows rows(args, smem.rows, warp_row, first_position);
  if (kMode != Mode::kPrefill) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.words[half] != nullptr) {
        rows.next_split[half] = splits_before(rows.words[half], begin);
      }
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    load_fragment_a(queries[k16], smem.rows.queries(), warp_row, k16);
  }
  __syncthreads();  // blocks replace the queries

  RowTile<Config::kColumns> state;
  state.clear();
  // `next`: the block after the one that was added, or `end`.
  const auto end_block = [&](int block, int next) {
    if (kMode == Mode::kPrefill || next / kBlocks == block / kBlocks) return;
    if (warp_has_rows) {
      write_selected<Config>(args, smem.rows.packed, state, rows, warp_row,
                             block / kBlocks * kBlocks, max_splits);
    }
    state.clear();
  };
  const auto fetch = [&](int stage, int block) {
    fetch_stage<Config>(smem.rows.stages[stage], args, chunk.seq, chunk.kv_head, block * kPageSize,
                        page_of(args.tokens, chunk.seq.slot, block * kPageSize));
  };

  // Blocks that lie before the tree.
  const int tree_block = kMode == Mode::kTree ? chunk.seq.length / kPageSize : end;
  const int shared_end = min(end, tree_block);
  int block = next_block(smem.any, begin, end), stage = 0;
  if (block < shared_end) fetch(stage, block);
  ptx::cp_async_commit();
#pragma unroll 1
  while (block < shared_end) {
    const int next = next_block(smem.any, block + 1, end);
    if (next < shared_end) fetch(stage ^ 1, next);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (warp_has_rows) {
      attend_block<Config>(state, smem.rows.stages[stage], rows, queries, args.scale_log2, block);
    }
    __syncthreads();  // all warps are done with the stage
    end_block(block, next);
    block = next;
    stage ^= 1;
  }
  if (kMode == Mode::kTree && block < end) {
    for (int i = 0; i < Config::kTreeTiles; ++i) fetch(i, tree_block + i);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    while (block < end) {
      for (int entry = block * kPageSize; warp_has_rows && entry < (block + 1) * kPageSize;
           entry += kKvTile) {
        for_each_tree_token<Config>(smem.rows, warp_row, entry, [&](int p) {
          attend_tree_token<Config>(
              state, smem.rows, args, queries, lane, warp, warp_row, 0, entry, p,
              [&](int i) -> typename ManyRowsSmem<Config>::Stage& { return smem.rows.stages[i]; });
        });
      }
      const int next = next_block(smem.any, block + 1, end);
      end_block(block, next);
      block = next;
    }
  }
  if (kMode == Mode::kPrefill && warp_has_rows) {
    write_out<Config>(args, smem.rows.packed, state, rows, warp_row);
  }
}

// ---- launchers

template <typename T, int kDim, Mode kMode>
void launch_sparse(const Context& ctx, const AttentionParams& params) {
  using Config = SparseConfig<T, kDim>;
  const StepTokens& tokens = params.tokens;
  constexpr size_t kSharedBytes = sizeof(SparseSmem<Config>);
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const int group = params.num_heads / params.num_kv_heads;
  const int num_chunks = (tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
  int num_ranges = 1;
  if (kMode != Mode::kPrefill) {
    const int most = (tokens.max_kv + kBlocks * kPageSize - 1) / (kBlocks * kPageSize);
    const int ctas_per_range = num_chunks * params.num_kv_heads * tokens.num_seqs;
    num_ranges = std::clamp(Config::kCtasPerSm * ctx.sm_count / ctas_per_range, 1, most);
  }
  const dim3 grid(num_chunks * params.num_kv_heads, num_ranges, tokens.num_seqs);
  const auto kernel = sparse_attention_kernel<Config, kMode>;
  allow_shared_bytes(kernel, kSharedBytes);
  launch(ctx, kernel, grid, Config::kThreads, kSharedBytes, make_args<T>(params), num_chunks,
         params.selection.max_splits, kMode == Mode::kPrefill ? params.selection.dense_len : 0);
}

void check_selected(const AttentionParams& params) {
  check_selection(params);
  CHECK(params.selection.words.size(2) <= kMaxWords,
        "attention: a sequence of up to {} tokens with a selection, expected at most {} on CUDA",
        params.tokens.max_kv, kMaxWords * 64 * kPageSize);
}

template <Mode kMode>
void launch_mode(const Context& ctx, const AttentionParams& params) {
  check_selected(params);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("attention with a selection: head_dim", params.head_dim, [&](auto dim) {
      launch_sparse<decltype(element), dim.value, kMode>(ctx, params);
    });
  });
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
  const bool one_token = !params.by_position && params.tokens.max_seq_tokens == 1;
  if (one_token && params.num_heads / params.num_kv_heads <= kWarpRows) {
    check_selected(params);
    return sparse_one_token(ctx, params);
  }
  params.by_position ? launch_mode<Mode::kTree>(ctx, params)
                     : launch_mode<Mode::kChain>(ctx, params);
}

void sparse_prefill(const Context& ctx, const AttentionParams& params) {
#ifdef CPMCU_SM90
  if (ctx.compute_capability == 90 && params.head_dim == 128) {
    check_selected(params);
    return sparse_prefill_sm90(ctx, params);
  }
#endif
  launch_mode<Mode::kPrefill>(ctx, params);
}

}  // namespace cpmcu::cuda
