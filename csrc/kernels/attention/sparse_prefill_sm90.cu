// Attention of a prompt's tokens to their chosen blocks, for heads of 128 on Hopper.
//
// Roofline: between two extremes. If adjacent tokens choose alike, tensor cores limit: 96 blocks,
// 100 MFLOP a token and layer of MiniCPM4-8B, 0.15 us at 680 TFLOP/s. If they choose independently,
// L2 limits: the union of eight tokens has about 420 blocks at 64K tokens, 3.4 MB a token, 0.6 us.
//
// Schedule: a CTA has 128 packed rows of a KV head: the 16 heads of 8 tokens.
//   producer   one thread: TMA copies of the blocks of the rows' union, in ascending order
//   consumers  two warpgroups of 64 rows. A warpgroup skips blocks that none of its rows chose.
//   While one warpgroup computes a softmax, the other one multiplies.
//
// Surprising: a KV tile is one block, although two at a time would be faster. With two, the other
// tokens would decide which blocks form a tile. The row maximum at which probabilities are rounded
// would depend on that, and so would the bits. A masked block alone changes no bit.
//
// An fp8 cache is first copied to 16-bit numbers (fp8_copies.cuh).
#include "kernels/attention/decode.cuh"
#include "kernels/attention/prefill_sm90.cuh"
#include "kernels/attention/selected_splits.cuh"
#include "kernels/attention/sparse_checks.h"

namespace cpmcu::cuda {
namespace {

template <typename T, bool kFp8_>
struct SparsePrefill : HopperPrefill<T, /*kTileEntries=*/kPageSize, /*kStages=*/4> {
  using Base = HopperPrefill<T, kPageSize, 4>;
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  struct Smem {
    typename Base::Tile tiles[Base::kStages][2];  // keys, values
    typename Base::Rows queries;                  // the output replaces them at the end
    PackedRows<Base::kRows> packed;
    uint64_t of_group[Base::kGroups][kMaxWords];  // blocks that the rows of a warpgroup chose
    uint64_t any[kMaxWords];                      // blocks that any row chose
    typename Base::Barriers barriers;
  };
};

// The work of a CTA. A tile is a block of the union.
template <typename Config>
struct SparseCta {
  using T = typename Config::Element;

  const AttentionArgs<T>& args;
  const Fp8Copies& copies;  // only kFp8 reads it
  KvStages<Config> stages;
  const Chunk& chunk;

  // kFp8: the row of copies where a block begins.
  __device__ __forceinline__ int copied_row(int block) const {
    return copies.first_row(static_cast<int>(blockIdx.z), chunk.kv_head) + block * kPageSize;
  }
  // Calls use(tile, block) for each block of the union.
  template <typename Use>
  __device__ __forceinline__ void for_each_tile(Use use) const {
    const int end = args.selection_words * 64;
    int tile = 0;
#pragma unroll 1
    for (int block = next_block(stages.smem.any, 0, end); block < end;
         block = next_block(stages.smem.any, block + 1, end)) {
      use(tile++, block);
    }
  }
};

// The blocks of the rows' tokens at positions from `first_position` on.
template <typename Config>
__device__ __forceinline__ void unite(const SparseCta<Config>& cta, int first_position) {
  const auto& args = cta.args;
  const Chunk& chunk = cta.chunk;
  for (int w = static_cast<int>(threadIdx.x); w < args.selection_words; w += Config::kThreads) {
    uint64_t any = 0;
    for (int group = 0; group < Config::kGroups; ++group) {
      const int begin = chunk.token_of(group * Config::kGroupRows);
      const int end =
          min(chunk.token_of((group + 1) * Config::kGroupRows - 1) + 1, chunk.seq.num_tokens);
      uint64_t of_group = 0;
      for (int token = begin; token < end; ++token) {
        const int row = chunk.seq.token_begin + token;
        if (args.tokens.positions[row] < first_position) continue;
        of_group |= selection_of(args, row, chunk.kv_head)[w];
      }
      cta.stages.smem.of_group[group][w] = of_group;
      any |= of_group;
    }
    cta.stages.smem.any[w] = any;
  }
}

// ---- the producer: one thread

template <typename Config>
__device__ __forceinline__ void fetch_blocks(const SparseCta<Config>& cta, const CacheMaps& maps) {
  const Chunk& chunk = cta.chunk;
  cta.for_each_tile([&](int tile, int block) {
    if constexpr (Config::kFp8) {
      cta.stages.fetch(tile, maps, {cta.copied_row(block)});
    } else {
      const int page = page_of(cta.args.tokens, chunk.seq.slot, block * kPageSize);
      cta.stages.fetch(tile, maps, {(page * cta.args.num_kv_heads + chunk.kv_head) * kPageSize});
    }
  });
}

// ---- the consumers: two warpgroups of 64 rows each

template <typename Config>
struct SparseConsumer : KvConsumer<Config> {
  using T = typename Config::Element;
  using Base = KvConsumer<Config>;
  using Queries = typename Config::Queries;
  using Scores = typename Config::Scores;
  using Base::warp, Base::lane, Base::wait, Base::release;
  static constexpr int kDim = Config::kDim;

  const SparseCta<Config>& cta;
  // Chosen blocks of the lane's rows, as bits. Null: the row needs no result.
  const uint64_t* words[2];
  int own[2];  // positions of the lane's rows

  __device__ __forceinline__ SparseConsumer(const SparseCta<Config>& cta_, int warp_,
                                            int first_position)
      : Base{cta_.stages, warp_, static_cast<int>(threadIdx.x % 32)}, cta(cta_) {
    const AttentionArgs<T>& args = cta.args;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp * kWarpRows + half * 8 + lane / 4;
      const int row = cta.chunk.seq.token_begin + cta.chunk.token_of(p);
      const bool exists =
          cta.stages.smem.packed.queries[p] >= 0 && args.tokens.positions[row] >= first_position;
      own[half] = exists ? args.tokens.positions[row] : -1;
      words[half] = exists ? selection_of(args, row, cta.chunk.kv_head) : nullptr;
    }
  }

  __device__ __forceinline__ void load_queries(Queries& queries) const {
    QueryCopy<Config::kConsumerThreads, T, Config::kRows, kDim> copy;
    copy.look_up(cta.stages.smem.packed);
    copy.start(cta.stages.smem.queries, cta.args.qkv);
    this->read_queries(queries);
  }

  // Hides the entries that the lane's rows do not see.
  __device__ __forceinline__ void hide(Scores& scores, int block) const {
    uint64_t sees[2];
    bool all = true, whole = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool chosen = words[half] != nullptr && has_block(words[half], block);
      sees[half] = chosen ? first_entries(own[half] + 1 - block * kPageSize) : 0;
      all = all && sees[half] == ~uint64_t{0};
      whole = whole && (sees[half] == 0 || sees[half] == ~uint64_t{0});
    }
    if (__all_sync(0xffffffffu, all)) return;
    if (!__all_sync(0xffffffffu, whole)) return mask_scores(scores, sees);
#pragma unroll
    for (int n = 0; n < kPageSize / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = sees[i / 2] != 0 ? scores[n][i] : kMinusInfinity;
    }
  }

  // Multiplies the columns of a block by the scales of its keys or values.
  __device__ __forceinline__ void scale(Scores& x, int block, Operand operand) const {
    if constexpr (Config::kFp8) {
      scale_columns<T>(x, cta.copies.scales[operand] + cta.copied_row(block));
    }
  }

  // Adds a block to the states of the warpgroup's rows.
  __device__ __forceinline__ void attend(RowTile<kDim>& rows, const Queries& queries, int tile,
                                         int block) const {
    Scores scores;
    this->multiply_keys(scores, queries, tile);
    ptx::wgmma_wait<0>();
    release(tile, 0);
    scale(scores, block, kKeys);
    hide(scores, block);
    softmax_step(rows, scores, cta.args.scale_log2);
    scale(scores, block, kValues);
    typename Config::Probabilities probabilities;
    this->pack(probabilities, scores);
    wait(tile, 1);
    const int unseen = (block + 1) * kPageSize - cta.chunk.seq.end();
    if (unseen > 0) this->clear_last_values(tile, unseen);
    this->multiply_values(rows, probabilities, tile);
    ptx::wgmma_wait<0>();
    release(tile, 1);
  }
  __device__ __forceinline__ void attend_all(RowTile<kDim>& rows, const Queries& queries) const {
    const uint64_t* const of_group = cta.stages.smem.of_group[warp / 4];
    cta.for_each_tile([&](int tile, int block) {
      if (has_block(of_group, block)) return attend(rows, queries, tile, block);
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
        wait(tile, operand);  // otherwise a warp could arrive twice in one phase
        release(tile, operand);
      }
    });
  }

  __device__ __forceinline__ void store_output(const RowTile<kDim>& rows) const {
    uint32_t needed = 0;  // bit r: row r of the warp needs its result
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (words[half] != nullptr) needed |= 1u << (half * 8 + lane / 4);
    }
    needed = __reduce_or_sync(0xffffffffu, needed);
    Base::store_output(rows, [&](int row) -> T* {
      if ((needed >> (row % kWarpRows) & 1) == 0) return nullptr;
      return cta.args.out + static_cast<int64_t>(cta.stages.smem.packed.outs[row]) * kDim;
    });
  }
};

// ---- kernels

// Grid: (chunks of packed rows * KV heads, 1, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_prefill_sm90_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                               const __grid_constant__ CacheMaps maps,
                               const __grid_constant__ Fp8Copies copies, int num_chunks,
                               int first_position) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(shared);
  const int warp = ptx::uniform_warp();
  if (threadIdx.x == 0) smem.barriers.init();
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Chunk chunk(args, num_chunks, Config::kRows);
  const int last_token = min(chunk.token_of(Config::kRows - 1), chunk.seq.num_tokens - 1);
  if (chunk.first >= chunk.num_packed || chunk.seq.first_entry + last_token < first_position) {
    return;
  }
  const SparseCta<Config> cta{args, copies, {smem}, chunk};
  unite(cta, first_position);
  smem.packed.template load<false, Config::kDim>(args, chunk);
  __syncthreads();

  if (warp >= Config::kConsumerThreads / 32) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) fetch_blocks(cta, maps);
    return;
  }
  ptx::take_registers<Config::kConsumerRegisters>();
  const SparseConsumer<Config> consumer(cta, warp, first_position);
  uint32_t queries[Config::kDim / 16][4];
  consumer.load_queries(queries);
  RowTile<Config::kDim> rows;
  rows.clear();
  consumer.attend_all(rows, queries);
  consumer.store_output(rows);
}

// ---- launchers

template <typename Config>
void launch_sparse_prefill(const Context& ctx, const AttentionParams& p,
                           const AttentionArgs<typename Config::Element>& args, int num_kv_heads,
                           int num_seqs, const CacheMaps& maps, const Fp8Copies& copies) {
  using Smem = typename Config::Smem;
  const auto kernel = sparse_prefill_sm90_kernel<Config>;
  const int group = p.num_heads / p.num_kv_heads;
  const int num_chunks = (p.tokens.max_seq_tokens * group + Config::kRows - 1) / Config::kRows;
  allow_shared_bytes(kernel, sizeof(Smem));
  launch(ctx, kernel, dim3(num_chunks * num_kv_heads, 1, num_seqs), Config::kThreads, sizeof(Smem),
         args, maps, copies, num_chunks, p.selection.dense_len);
}

template <typename T>
void launch_any_cache(const Context& ctx, const AttentionParams& p) {
  if (p.k_scales.empty()) {
    return launch_sparse_prefill<SparsePrefill<T, false>>(
        ctx, p, make_args<T>(p), p.num_kv_heads, p.tokens.num_seqs,
        make_cache_maps(p.k_cache, p.v_cache, p.head_dim), {});
  }
  const auto attend = [&](const AttentionArgs<T>& args, const Fp8Copies& copies) {
    launch_sparse_prefill<SparsePrefill<T, true>>(
        ctx, p, args, copies.num_kv_heads, copies.num_seqs,
        make_copy_maps(copies, p.qkv.dtype(), p.head_dim), copies);
  };
  for_each_round<T>(ctx, p, {.begin = p.selection.dense_len, .end = INT_MAX}, attend);
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, slot_lengths,
// page_table, selection.
void sparse_prefill_sm90(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(),
                [&](auto element) { launch_any_cache<decltype(element)>(ctx, params); });
}

}  // namespace cpmcu::cuda
