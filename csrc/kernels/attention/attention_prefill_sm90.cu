// attention_prefill on Hopper, for heads of 128 dimensions, causal, without a window.
//
//   out[t, h] = softmax(scale * q[t, h] K^T) V, with K and V of KV head h / group
//
// Roofline: 4 * tokens * entries * D operations for each query head, on tensor cores. Example: a
// layer of MiniCPM4-8B, 2048 tokens after 30000 cached ones: 1 TFLOP, 1.5 ms at 680 TFLOP/s. K and
// V of a KV tile (128 entries) are 64 KB from L2 for 8.4 MFLOP, which suffices with 128 query rows.
//
// Schedule: a CTA has 128 query rows of one (sequence, query head).
//   producer   one thread of a third warpgroup: TMA copies of pages of K and V, two stages
//   consumers  two warpgroups of 64 rows: queries, scores of 128 entries and output in registers
//   KV tiles are two pages each, in ascending order from entry 0.
//
// Surprising: each softmax overlaps a GEMM of the same warps. For tile t, a warpgroup issues the
// GEMM for the scores of t, then the GEMM for probabilities * values of t - 1. It waits for the
// first only. The softmax of t runs during the second. One warpgroup alone keeps its tensor cores
// busy; the other fills the gaps.
//
// An entry that a row does not see changes no bit of the row. Therefore the bits do not depend on
// the prefill chunk (tiles.cuh).
//
// An fp8 cache is first copied to 16-bit numbers (fp8_copies.cuh).
#include "kernels/attention/prefill_sm90.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, bool kFp8_>
struct DensePrefill : HopperPrefill<T, /*kTileEntries=*/128, /*kStages=*/2> {
  using Base = HopperPrefill<T, 128, 2>;
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static_assert(Base::kTileEntries == kCopyEntries && Base::kRows <= kCopyEntries);
  struct Smem {
    typename Base::Tile tiles[Base::kStages][2];  // keys, values
    typename Base::Rows queries;                  // the output replaces them at the end
    typename Base::Barriers barriers;
  };
};

// The work of a CTA: the query rows of one (sequence, query head).
template <typename Config>
struct PrefillCta {
  using T = typename Config::Element;
  static constexpr int kTileEntries = Config::kTileEntries;

  const AttentionArgs<T>& args;
  const Fp8Copies& copies;  // only kFp8 reads it
  KvStages<Config> stages;
  const Sequence& seq;
  const int cta_row;  // the CTA's first row within the sequence
  const int head = blockIdx.x;
  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const int cta_rows = min(Config::kRows, seq.num_tokens - cta_row);
  const int entry_end = seq.length + cta_row + cta_rows;  // end of the entries that some row sees
  const int num_tiles = (entry_end + kTileEntries - 1) / kTileEntries;

  // Only kFp8: number of the first row of the copies that the CTA reads.
  __device__ __forceinline__ int first_copy() const {
    return copies.first_row(static_cast<int>(blockIdx.z), kv_head);
  }
};

// ---- the producer: one thread

template <typename Config>
__device__ __forceinline__ void fetch_entries(const PrefillCta<Config>& cta,
                                              const CacheMaps& maps) {
  const StepTokens& tokens = cta.args.tokens;
  [[maybe_unused]] const int* pages =
      tokens.page_table + static_cast<int64_t>(cta.seq.slot) * tokens.max_pages;
  [[maybe_unused]] const int last_page = (cta.entry_end - 1) / kPageSize;
  int map_rows[Config::kPages];  // rows of the tensor map where this tile's pages begin
  const auto look_up = [&](int tile) {
#pragma unroll
    for (int i = 0; i < Config::kPages; ++i) {
      if constexpr (Config::kFp8) {
        map_rows[i] = cta.first_copy() + (tile * Config::kPages + i) * kPageSize;
      } else {
        const int page = pages[min(tile * Config::kPages + i, last_page)];
        map_rows[i] = (page * cta.args.num_kv_heads + cta.kv_head) * kPageSize;
      }
    }
  };
  look_up(0);
#pragma unroll 1
  for (int tile = 0; tile < cta.num_tiles; ++tile) {
    cta.stages.fetch(tile, maps, map_rows);
    look_up(tile + 1);
  }
}

// ---- the consumers: two warpgroups of 64 rows each

template <typename Config>
struct PrefillConsumer : KvConsumer<Config> {
  using T = typename Config::Element;
  using Base = KvConsumer<Config>;
  using Queries = typename Config::Queries;
  using Scores = typename Config::Scores;
  using Probabilities = typename Config::Probabilities;
  using Base::warp, Base::lane, Base::wait, Base::release, Base::multiply_keys, Base::pack,
      Base::multiply_values;
  static constexpr int kDim = Config::kDim, kTileEntries = Config::kTileEntries;

  const PrefillCta<Config>& cta;

  __device__ __forceinline__ void load_queries(Queries& queries) const {
    const AttentionArgs<T>& args = cta.args;
    const int64_t stride = args.qkv_row;
    fetch_tile<Config::kConsumerThreads>(
        cta.stages.smem.queries,
        args.qkv + (cta.seq.token_begin + cta.cta_row) * stride + cta.head * args.q_head, stride,
        cta.cta_rows);
    this->read_queries(queries);
  }
  // Multiplies the columns of a tile by the scales of its keys or values.
  __device__ __forceinline__ void scale(Scores& x, int tile, Operand operand) const {
    if constexpr (Config::kFp8) {
      scale_columns<T>(
          x, cta.copies.scales[operand] + cta.first_copy() + int64_t{tile} * kTileEntries);
    }
  }
  // Replaces the scores of a tile by probabilities in float32 and updates the rows' sums. The
  // probabilities are then multiplied by the scales of an fp8 cache.
  __device__ __forceinline__ void softmax_tile(RowTile<kDim>& rows, Scores& scores,
                                               float (&factor)[2], int tile) const {
    scale(scores, tile, kKeys);
    const int warp_row = cta.cta_row + warp * 16;
    // Number of the tile's entries that the warp's first row sees.
    const int seen = cta.seq.length + warp_row + 1 - tile * kTileEntries;
    if (seen < kTileEntries) {
#pragma unroll
      for (int n = 0; n < kTileEntries / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int entry = n * 8 + lane % 4 * 2 + i % 2;
          if (entry >= seen + lane / 4 + i / 2 * 8) scores[n][i] = kMinusInfinity;
        }
      }
    }
    add_scores(rows, scores, cta.args.scale_log2, factor);
    scale(scores, tile, kValues);
  }

  // All tiles in order. The keys of a tile are multiplied together with the values of the previous
  // one.
  __device__ __forceinline__ void attend(RowTile<kDim>& rows, const Queries& queries) const {
    Scores scores;
    Probabilities probabilities;
    float factor[2];
    multiply_keys(scores, queries, 0);
    ptx::wgmma_wait<0>();
    release(0, 0);
    softmax_tile(rows, scores, factor, 0);
    pack(probabilities, scores);
#pragma unroll 1
    for (int tile = 1; tile < cta.num_tiles; ++tile) {
      multiply_keys(scores, queries, tile);
      wait(tile - 1, 1);
      multiply_values(rows, probabilities, tile - 1);
      ptx::wgmma_wait<1>();
      release(tile, 0);
      softmax_tile(rows, scores, factor, tile);
      ptx::wgmma_wait<0>();
      release(tile - 1, 1);
      if (is_not_one(factor)) rows.multiply(factor);
      pack(probabilities, scores);
    }
    const int last = cta.num_tiles - 1;
    wait(last, 1);
    this->clear_last_values(last, cta.num_tiles * kTileEntries - cta.entry_end);
    multiply_values(rows, probabilities, last);
    ptx::wgmma_wait<0>();
  }
  __device__ __forceinline__ void store_output(const RowTile<kDim>& rows) const {
    Base::store_output(rows, [&](int row) -> T* {
      if (row >= cta.cta_rows) return nullptr;
      const int64_t t = cta.seq.token_begin + cta.cta_row + row;
      return cta.args.out + (t * cta.args.num_heads + cta.head) * kDim;
    });
  }
};

// ---- kernels

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_prefill_sm90_kernel(
    const __grid_constant__ AttentionArgs<typename Config::Element> args,
    const __grid_constant__ CacheMaps maps, const __grid_constant__ Fp8Copies copies) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(shared);
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) smem.barriers.init();
  __syncthreads();
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Sequence seq = load_sequence(args.tokens, blockIdx.z);
  const int cta_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kRows;
  if (cta_row >= seq.num_tokens || seq.first_entry + cta_row >= args.end_position) return;
  const PrefillCta<Config> cta{args, copies, {smem}, seq, cta_row};

  if (warp >= Config::kConsumerThreads / 32) {
    ptx::give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) fetch_entries(cta, maps);
    return;
  }
  ptx::take_registers<Config::kConsumerRegisters>();
  const PrefillConsumer<Config> consumer{{cta.stages, warp, lane}, cta};
  uint32_t queries[Config::kDim / 16][4];
  consumer.load_queries(queries);
  RowTile<Config::kDim> rows;
  rows.clear();
  consumer.attend(rows, queries);
  consumer.store_output(rows);
}

// ---- launchers

template <typename Config>
void launch_prefill(const Context& ctx, const AttentionParams& p,
                    const AttentionArgs<typename Config::Element>& args, dim3 grid,
                    const CacheMaps& maps, const Fp8Copies& copies) {
  const auto kernel = attention_prefill_sm90_kernel<Config>;
  allow_shared_bytes(kernel, sizeof(typename Config::Smem));
  grid.y = (p.tokens.max_seq_tokens + Config::kRows - 1) / Config::kRows;
  launch(ctx, kernel, grid, dim3(Config::kThreads), sizeof(typename Config::Smem), args, maps,
         copies);
}

template <typename T>
void launch_any_cache(const Context& ctx, const AttentionParams& p) {
  if (p.k_scales.empty()) {
    return launch_prefill<DensePrefill<T, false>>(
        ctx, p, make_args<T>(p), dim3(p.num_heads, 1, p.tokens.num_seqs),
        make_cache_maps(p.k_cache, p.v_cache, p.head_dim), {});
  }
  const int group = p.num_heads / p.num_kv_heads;
  const NeededTokens needed{.begin = 0, .end = make_args<T>(p).end_position};
  for_each_round<T>(ctx, p, needed, [&](const AttentionArgs<T>& args, const Fp8Copies& copies) {
    launch_prefill<DensePrefill<T, true>>(
        ctx, p, args, dim3(group * copies.num_kv_heads, 1, copies.num_seqs),
        make_copy_maps(copies, p.qkv.dtype(), p.head_dim), copies);
  });
}

}  // namespace

void attention_prefill_sm90(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(),
                [&](auto element) { launch_any_cache<decltype(element)>(ctx, params); });
}

}  // namespace cpmcu::cuda
