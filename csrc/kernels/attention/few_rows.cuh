// Attention of few rows: a block has 16 packed rows, one mma tile, and its warps share the entries.
//
// Each warp does one of four units in turn. Their states go through shared memory, and every warp
// adds them up for a quarter of the dimensions. Bound: the cache is read once, at memory bandwidth.
// Each warp copies its own keys and values, the keys a round ahead, and fills their place again as
// soon as it may: at D = 128, 96 KiB are on their way for each of two blocks of an SM before the
// queries come.
//
// Length of attention_few_rows_kernel: the copies before the first round, and the rounds, share all
// scalars. With the copies in a function of their own ptxas 13.0 spills 8 bytes of a thread
// (D = 64).
#pragma once

#include "kernels/attention/decode.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_>
struct FewRowsConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = kDim <= 128 ? 4 : 2;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarpRows;
  static constexpr int kRoundCells = kWarps * kUnit;  // a unit of each warp
  static constexpr int kColumns = kDim / kWarps;      // that a warp adds up
  static constexpr int kBlocks = kDim == 64 ? 4 : 2;  // on one SM
  static_assert(split_begin(1) % kRoundCells == 0, "a round lies in one split");
};

template <typename Config>
struct FewRowsSmem {
  using T = typename Config::Element;
  static constexpr int kDim = Config::kDim;
  using Cells = SwizzledTile<T, kUnit, kDim>;
  union Keys {
    Cells entries;
    float4 acc[kDim / 8][32];  // the unit's, in their place, for all warps to read
  };
  struct Unit {    // of one warp, which alone fills it
    Keys keys[2];  // of a round and the next
    Cells values;
  };
  static_assert(sizeof(Cells) == sizeof(Keys));
  using Queries = SwizzledTile<T, Config::kRows, kDim>;
  static_assert(sizeof(Queries) <= sizeof(Keys), "the queries come through a tile of keys");
  Unit units[Config::kWarps];
  float2 states[Config::kWarps][Config::kRows];  // references and sums of the units of a round
  PackedRows<Config::kRows> packed;
};

// ---- the steps of a round

// Probabilities of the entries of a warp's unit, and their sums.
template <typename Config>
__device__ __forceinline__ UnitState score_unit(float (&scores)[1][1][kUnitTiles][4],
                                                const uint32_t (&queries)[Config::kDim / 16][4],
                                                FewRowsSmem<Config>& smem,
                                                const AttentionArgs<typename Config::Element>& args,
                                                const Sequence& seq, int i, int warp, int entry) {
  multiply_keys<typename Config::Element>(scores[0], smem.units[warp].keys[i].entries, 0,
                                          [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
                                            for (int j = 0; j < 4; ++j) q[0][j] = queries[k16][j];
                                          });
  smem.packed.hide(scores, args, seq, 0, entry);
  return softmax_of_unit(scores[0][0], args.scale_log2);
}

// The probabilities of a warp's unit times its values. The products take the place of its keys.
template <typename Config>
__device__ __forceinline__ void multiply_unit(const float (&probabilities)[kUnitTiles][4],
                                              const UnitState& sums, FewRowsSmem<Config>& smem,
                                              int i, int warp, int lane) {
  auto& unit = smem.units[warp];
  multiply_unit_values<typename Config::Element, Config::kDim>(
      probabilities,
      [&](uint32_t (&v)[4], int k16, int n16) {
        load_fragment_values(v, unit.values, k16 * 16, n16);
      },
      [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unit.keys[i].acc[2 * n16 + n][lane] =
              make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
        }
      });
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      smem.states[warp][half * 8 + lane / 4] = make_float2(sums.reference[half], sums.sum[half]);
    }
  }
}

// ---- kernels

// Grid: (chunks * KV heads, ranges, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    attention_few_rows_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                              int num_chunks, int max_splits) {
  using T = typename Config::Element;
  using Smem = FewRowsSmem<Config>;
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);

  Trace trace;
  // What follows has weights to fetch, or is the combination, for which there is room; with more
  // rows it finds none before this kernel is done.
  const bool launches_early = args.tokens.num_tokens == 1;
  if (launches_early) ptx::pdl_launch();
  const int warp = ptx::uniform_warp();
  const int lane = threadIdx.x % 32;
  const int slot = args.tokens.seq_slots[static_cast<int>(blockIdx.z)];
  int round_entry, page, next_page;  // of this warp's unit in a round, and in the next
  const auto page_of_unit = [&](int entry) {
    return page_of(args.tokens, slot, entry + warp * kUnit);
  };
  auto look_up = [&](int entry) {
    round_entry = entry / Config::kRoundCells * Config::kRoundCells;
    page = page_of_unit(round_entry);
    next_page = page_of_unit(round_entry + Config::kRoundCells);
  };
  look_up(split_begin(range_index()));
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const Range range = range_of_block(args, seq, max_splits, false, look_up);
  if (range.entry_begin >= range.entry_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }

  auto& unit = smem.units[warp];
  auto exists = [&](int entry) { return entry >= range.entry_begin && entry < range.entry_end; };
  // Starts to copy the unit from `entry` on, in a group of its own, which is empty if there is
  // none.
  auto fetch = [&](auto& tile, const T* cache, int entry, int page) {
    if (exists(entry)) {
      const int64_t offset = entry_offset<kDim>(args, page, chunk.kv_head, entry);
      fetch_tile<32>(tile, cache + offset, kDim, seq.end() - entry, lane);
    }
    ptx::cp_async_commit();
  };

  // Cells of earlier steps need not wait for this one's (core/launch.h). The queries come to where
  // the last warp's second keys will be.
  const int first = round_entry + warp * kUnit, second = first + Config::kRoundCells;
  const bool is_old = (exists(second) ? second : first) + kUnit <= seq.first_entry;
  // Where all multiprocessors are full: the loads of a combination that is still running, whose end
  // the queries wait for, should not stand in a queue behind all that blocks have room for.
  const bool one_by_one = gridDim.x * gridDim.y * gridDim.z > ptx::num_sms();
  const bool lends_tile = warp == Config::kWarps - 1;
  auto& queries_tile =
      reinterpret_cast<typename Smem::Queries&>(smem.units[Config::kWarps - 1].keys[1]);
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
#pragma unroll 1  // little code: what runs once takes as long as it takes to fetch it
  for (int pass = 0; pass < 2; ++pass) {
    const bool now = is_old == (pass == 0);
    if (pass == 1) {
      ptx::pdl_wait();
      trace.stamp(1);
      if (!launches_early) ptx::pdl_launch();
    }
    if (now) fetch(unit.keys[0].entries, args.k_cache, first, page);
    if (pass == 0) {
      smem.packed.template load<false, kDim>(args, chunk);
      __syncthreads();
      queries_copy.look_up(smem.packed);
    }
    if (now) {
      if (one_by_one) ptx::cp_async_wait<0>();
      fetch(unit.values, args.v_cache, first, page);
      if (one_by_one) ptx::cp_async_wait<0>();
      if (!lends_tile) fetch(unit.keys[1].entries, args.k_cache, second, next_page);
    }
  }
  queries_copy.copy(queries_tile, args.qkv);
  __syncthreads();
  trace.stamp(2);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragment_a(queries[k16], queries_tile, 0, k16);
  __syncthreads();
  if (lends_tile) fetch(unit.keys[1].entries, args.k_cache, second, next_page);

  RowTile<Config::kColumns> state;  // of the split: all rows, this warp's dimensions
  state.clear();
  int split = range.split, split_end = split_begin(split + 1);
#pragma unroll 1
  for (int i = 0; round_entry < range.entry_end; round_entry += Config::kRoundCells, i ^= 1) {
    // On their way: keys, values, and the keys of the next round.
    const int entry = round_entry + warp * kUnit;
    page = next_page;
    next_page = page_of_unit(round_entry + 2 * Config::kRoundCells);
    ptx::cp_async_wait<2>();
    __syncwarp();
    UnitState sums;
    float scores[1][1][kUnitTiles][4];
    if (exists(entry)) {
      sums = score_unit<Config>(scores, queries, smem, args, seq, i, warp, entry);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    if (exists(entry)) {
      multiply_unit<Config>(scores[0][0], sums, smem, i, warp, lane);
    }
    __syncwarp();
    fetch(unit.values, args.v_cache, entry + Config::kRoundCells, page);
    __syncthreads();
#pragma unroll 1  // little code, as above
    for (int u = 0; u < Config::kWarps; ++u) {
      if (!exists(round_entry + u * kUnit)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = smem.states[u][half * 8 + lane / 4];
        sums.reference[half] = v.x, sums.sum[half] = v.y;
      }
      float weight[2];
      begin_unit(state, sums, weight);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float4 part = smem.units[u].keys[i].acc[warp * (Config::kColumns / 8) + n][lane];
        add_weighted(state.acc[n], {part.x, part.y, part.z, part.w}, weight);
      }
    }
    __syncthreads();
    fetch(unit.keys[i].entries, args.k_cache, entry + 2 * Config::kRoundCells, next_page);
    if (round_entry + Config::kRoundCells >= min(split_end, range.entry_end)) {
      write_split<kDim>(args, smem.packed, state, 0, warp * Config::kColumns, split, max_splits);
      split_end = split_begin(++split + 1);
      state.clear();
    }
  }
  trace.stamp(3);
  trace.end();
}

}  // namespace
}  // namespace cpmcu::cuda
