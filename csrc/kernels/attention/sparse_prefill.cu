// attention_prefill with a selection: tokens from dense_len on (sparse.h).
//
//   out[t, h] = softmax(scale * q[t, h] K^T) V over the blocks of (t, h / group)
//
// Roofline: the chosen blocks are read once for all tokens of a CTA, 256 * D bytes each. Other CTAs
// of the same KV head find them in L2.
//
// Schedule: a CTA has 64 packed rows of a KV head, as in many_rows.cuh, and 16 of them in each of
// four warps.
//   1. It computes the union of its tokens' blocks.
//   2. It copies one block at a time, the next one while it multiplies. A row that did not choose
//      the block is masked; a warp without such a row skips it.
//   3. It writes `out`: a row has one state for all blocks.
//
// Surprising: a masked block changes no bit, so the union does not matter to a row.
#include "kernels/attention/many_rows_steps.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/attention/sparse_checks.h"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_>
struct SparseConfig : ManyRowsConfig<T, kDim_, kFp8_> {
  static constexpr int kStages = 2;
  static constexpr bool kMerges = false;
  static_assert(ManyRowsConfig<T, kDim_, kFp8_>::kStageEntries == kPageSize,
                "a stage tile is a block");
};

template <typename Config>
struct SparseSmem {
  ManyRowsSmem<Config> rows;
  uint64_t any[kMaxWords];  // union of the tokens' blocks
};

// The two packed rows of a lane and their selections.
struct LaneRows {
  const uint64_t* words[2];  // chosen blocks as bits; null: the row does not exist
  int own[2];                // position of the row's token

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
#pragma unroll(Config::kFp8 ? 1 : kPageSize / kKvTile)  // otherwise fp8 spills registers
  for (int kv_tile = 0; kv_tile < kPageSize / kKvTile; ++kv_tile) {
    float scores[1][kKvTileN8][4];
    multiply_keys<T>(scores, stage.keys, kv_tile * kKvTile, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
    });
    scale_columns<T>(scores[0], stage.keys, kv_tile * kKvTile);
    const uint32_t tile_sees[2] = {static_cast<uint32_t>(sees[0] >> kv_tile * kKvTile),
                                   static_cast<uint32_t>(sees[1] >> kv_tile * kKvTile)};
    mask_scores(scores[0], tile_sees);
    add_kv_tile<T>(
        state, scores[0], scale_log2, 0, values_from(stage.values, kv_tile * kKvTile),
        [&](float (&p)[kKvTileN8][4]) { scale_columns<T>(p, stage.values, kv_tile * kKvTile); });
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

// Grid: (chunks of packed rows * KV heads, 1, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sparse_prefill_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                          int num_chunks, int first_position) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<SparseSmem<Config>*>(shared);
  ptx::pdl_launch();
  ptx::pdl_wait();
  const Chunk chunk(args, num_chunks, Config::kRows);
  if (chunk.first >= chunk.num_packed) return;
  unite<Config>(smem, args, chunk, first_position);
  smem.rows.packed.template load<false, kDim>(args, chunk);
  if (threadIdx.x == 0) smem.rows.chunk = chunk;
  __syncthreads();

  const int warp = ptx::uniform_warp();
  const int warp_row = warp * kWarpRows;
  const bool warp_has_rows = chunk.first + warp_row < chunk.num_packed;
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
  queries_copy.look_up(smem.rows.packed);
  queries_copy.start(smem.rows.queries(), args.qkv);
  ptx::cp_async_commit();
  LaneRows rows(args, smem.rows, warp_row, first_position);
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
  const auto fetch = [&](int stage, int block) {
    fetch_stage<Config>(smem.rows.stages[stage], args, chunk.seq, chunk.kv_head, block * kPageSize,
                        page_of(args.tokens, chunk.seq.slot, block * kPageSize));
  };
  const int end = args.selection_words * 64;
  int block = next_block(smem.any, 0, end), stage = 0;
  if (block < end) fetch(stage, block);
  ptx::cp_async_commit();
#pragma unroll 1
  while (block < end) {
    const int next = next_block(smem.any, block + 1, end);
    if (next < end) fetch(stage ^ 1, next);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (warp_has_rows) {
      attend_block<Config>(state, smem.rows.stages[stage], rows, queries, args.scale_log2, block);
    }
    __syncthreads();  // all warps are done with the stage
    block = next;
    stage ^= 1;
  }
  if (warp_has_rows) write_out<Config>(args, smem.rows.packed, state, rows, warp_row);
}

// ---- launchers

template <typename Config>
void launch_prefill(const Context& ctx, const AttentionParams& params) {
  const StepTokens& tokens = params.tokens;
  constexpr size_t kSharedBytes = sizeof(SparseSmem<Config>);
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const int group = params.num_heads / params.num_kv_heads;
  const int num_chunks = (tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
  const auto kernel = sparse_prefill_kernel<Config>;
  allow_shared_bytes(kernel, kSharedBytes);
  launch(ctx, kernel, dim3(num_chunks * params.num_kv_heads, 1, tokens.num_seqs), Config::kThreads,
         kSharedBytes, make_args<typename Config::Element>(params), num_chunks,
         params.selection.dense_len);
}

}  // namespace

void check_selected(const AttentionParams& params) {
  check_selection(params);
  CHECK(params.selection.words.size(2) <= kMaxWords,
        "attention: a sequence of up to {} tokens with a selection, expected at most {} on CUDA",
        params.tokens.max_kv, kMaxWords * 64 * kPageSize);
}

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, slot_lengths,
// page_table, selection.
void sparse_prefill(const Context& ctx, const AttentionParams& params) {
  check_selected(params);
#ifdef CPMCU_SM90
  if (ctx.compute_capability == 90 && params.head_dim == 128) {
    return sparse_prefill_sm90(ctx, params);
  }
#endif
  dispatch_selected(params, [&](auto element, auto dim, auto is_fp8) {
    launch_prefill<SparseConfig<decltype(element), dim.value, is_fp8.value>>(ctx, params);
  });
}

}  // namespace cpmcu::cuda
