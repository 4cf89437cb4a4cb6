// attention_decode for at most 16 packed rows of a KV head. The warps of a CTA share the entries.
//
// Roofline: the cache is read once, at HBM bandwidth.
//
// Schedule of a round (one KV tile for each warp):
//   1. Each warp multiplies the queries by the keys of its KV tile and computes probabilities.
//   2. It multiplies probabilities by values. The result replaces the keys in shared memory.
//   3. Barrier. Each warp adds the results of all warps, in order, for its part of the dimensions.
// Each warp copies its own keys and values, the keys one round ahead, and refills a buffer as soon
// as it is free. For D = 128, 96 KiB are in flight for each of the two CTAs of an SM before the
// queries arrive. With kRotary, the kernel applies rotary_kv first (few_rows_rotary.cuh).
// With kCluster, it combines the splits (few_rows_cluster.cuh); a CTA then has one split.
//
// Surprising: code size matters. Code that runs once costs the time to fetch it, so the prologue
// and the sums are loops that are not unrolled.
//
// Length of attention_few_rows_kernel: the prologue and the rounds share all scalars. With the
// prologue in a function of its own, ptxas 13.0 spills 8 bytes of a thread (D = 64).
#pragma once

#include "kernels/attention/few_rows_cluster.cuh"
#include "kernels/attention/few_rows_rotary.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_ = false, bool kSinks_ = false, bool kRotary_ = false,
          bool kCluster_ = false>
struct FewRowsConfig {
  using Element = T;
  static constexpr bool kRotary = kRotary_;  // only without kFp8
  using Rotary = std::conditional_t<kRotary, RotaryKvArgs<T>, Nothing>;
  static constexpr bool kSinks = kSinks_;
  static constexpr bool kCluster = kCluster_;  // only for D up to 128, without kSinks
  using Target = std::conditional_t<kCluster, typename ClusterSums<kDim_>::Target, Nothing>;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = kDim <= 128 ? 4 : 2;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarpRows;
  // Entries of a round, which has one KV tile for each warp.
  static constexpr int kRoundEntries = kWarps * kKvTile;
  static constexpr int kColumns = kDim / kWarps;  // dimensions of the output that a warp sums
  static constexpr int kCtasPerSm = kDim == 64 ? 4 : 2;  // CTAs that fit on one SM
  static_assert(split_begin(1) % kRoundEntries == 0, "a round must lie in one split");
  static_assert(!kCluster || split_begin(1) == kRoundEntries, "a cluster's CTA has one round");
  static constexpr int kKeyBuffers = kCluster ? 1 : 2;
};

template <typename Config>
struct FewRowsSmem {
  using T = typename Config::Element;
  static constexpr int kDim = Config::kDim;
  using KvTile = CacheTile<T, Config::kFp8, kKvTile, kDim>;
  union Keys {
    KvTile entries;
    // Sums of probability * value over the KV tile. They replace the keys.
    float4 acc[kDim / 8][32];
  };
  struct WarpBuffers {               // each warp fills only its own buffers
    Keys keys[Config::kKeyBuffers];  // the keys of this round and of the next one
    KvTile values;
  };
  static_assert(sizeof(KvTile) == sizeof(Keys) || Config::kFp8);
  using Queries = SwizzledTile<T, Config::kRows, kDim>;
  static_assert(sizeof(Queries) <= sizeof(Keys), "the queries must fit a key buffer");
  WarpBuffers warps[Config::kWarps];
  std::conditional_t<Config::kCluster, Queries, Nothing> queries;
  float2 states[Config::kWarps][Config::kRows];  // row maxima and sums of each KV tile of a round
  PackedRows<Config::kRows> packed;
  std::conditional_t<Config::kRotary, NewToken<T, kDim>, Nothing> fresh;
  std::conditional_t<Config::kCluster, ClusterSums<kDim>, Nothing> sums;

  // The tile of the queries. Without kCluster, it is the second key buffer of the last warp, until
  // the queries are in registers.
  __device__ __forceinline__ Queries& queries_tile() {
    if constexpr (Config::kCluster) {
      return queries;
    } else {
      return reinterpret_cast<Queries&>(warps[Config::kWarps - 1].keys[1]);
    }
  }
};

// ---- the steps of a round

// Replaces the scores of a warp's KV tile by probabilities. Returns their row maxima and sums.
template <typename Config>
__device__ __forceinline__ SoftmaxState
score_kv_tile(float (&scores)[1][1][kKvTileN8][4], const uint32_t (&queries)[Config::kDim / 16][4],
              FewRowsSmem<Config>& smem, const AttentionArgs<typename Config::Element>& args,
              const Sequence& seq, int i, int warp, int entry) {
  multiply_keys<typename Config::Element>(scores[0], smem.warps[warp].keys[i].entries, 0,
                                          [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
                                            for (int j = 0; j < 4; ++j) q[0][j] = queries[k16][j];
                                          });
  scale_columns<typename Config::Element>(scores[0][0], smem.warps[warp].keys[i].entries, 0);
  smem.packed.hide(scores, args, seq, 0, entry);
  return softmax_of_kv_tile(scores[0][0], args.scale_log2);
}

// Multiplies the probabilities of a warp's KV tile by their scales and values. The result replaces
// the keys.
template <typename Config>
__device__ __forceinline__ void multiply_kv_tile(float (&probabilities)[kKvTileN8][4],
                                                 const SoftmaxState& sums,
                                                 FewRowsSmem<Config>& smem, int i, int warp,
                                                 int lane) {
  auto& buffers = smem.warps[warp];
  scale_columns<typename Config::Element>(probabilities, buffers.values, 0);
  multiply_kv_tile_values<typename Config::Element, Config::kDim>(
      probabilities, values_from(buffers.values, 0), [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          buffers.keys[i].acc[2 * n16 + n][lane] =
              make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
        }
      });
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      smem.states[warp][half * 8 + lane / 4] = make_float2(sums.row_max[half], sums.sum[half]);
    }
  }
}

// ---- kernels

// Grid: (chunks of packed rows * KV heads, split ranges, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_few_rows_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                              int num_chunks, int max_splits,
                              const __grid_constant__ typename Config::Rotary rotary) {
  using T = typename Config::Element;
  using Smem = FewRowsSmem<Config>;
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);

  Trace trace;
  if constexpr (Config::kCluster) smem.sums.begin();
  // For one token, the next kernel fits beside this one and can start early: it prefetches weights,
  // or it is attention_combine. For more tokens, it finds no room before this kernel ends.
  const bool launches_early = args.tokens.num_tokens == 1;
  if (launches_early) ptx::pdl_launch();
  const int warp = ptx::uniform_warp();
  const int lane = threadIdx.x % 32;
  const int slot = args.tokens.seq_slots[static_cast<int>(blockIdx.z)];
  int round_entry, page, next_page;  // pages of this warp's KV tile in this round and the next
  const auto page_of_kv_tile = [&](int entry) {
    return page_of(args.tokens, slot, entry + warp * kKvTile);
  };
  auto look_up = [&](int entry) {
    round_entry = entry / Config::kRoundEntries * Config::kRoundEntries;
    page = page_of_kv_tile(round_entry);
    next_page = page_of_kv_tile(round_entry + Config::kRoundEntries);
  };
  look_up(split_begin(split_range_index()));
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const SplitRange range = split_range_of_cta(args, seq, max_splits, false, look_up);
  if (range.entry_begin >= range.entry_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }

  auto& buffers = smem.warps[warp];
  auto exists = [&](int entry) { return entry >= range.entry_begin && entry < range.entry_end; };
  const int loaded_end = Config::kRotary ? seq.first_entry : seq.end();
  // Starts the copy of the KV tile from `entry` on, as one cp.async group. If the range has no such
  // tile, the group is empty.
  auto fetch = [&](auto& tile, Operand operand, int entry, int page) {
    if (exists(entry)) {
      const int64_t offset = entry_offset<kDim>(args, page, chunk.kv_head, entry);
      fetch_cache<32>(tile, args, operand, offset, loaded_end - entry, lane);
    }
    ptx::cp_async_commit();
  };

  // KV entries of earlier steps are loaded without waiting for the previous kernel (core/launch.h).
  const int first = round_entry + warp * kKvTile, second = first + Config::kRoundEntries;
  const bool is_old =
      Config::kRotary || (exists(second) ? second : first) + kKvTile <= seq.first_entry;
  // If there are more CTAs than SMs, keys and values are loaded one after the other. The
  // attention_combine of the previous layer may still run, and the queries wait for its end. Its
  // loads should not queue behind all loads that these CTAs could issue.
  const bool one_by_one = gridDim.x * gridDim.y * gridDim.z > ptx::num_sms();
  const bool lends_tile = !Config::kCluster && warp == Config::kWarps - 1;
  auto& next_keys = buffers.keys[Config::kKeyBuffers - 1].entries;
  auto& queries_tile = smem.queries_tile();
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
  const int num_seq_splits = num_splits(seq.end());
  const bool combines = Config::kCluster && num_seq_splits > 1;
  typename Config::Target target;
  if constexpr (Config::kCluster) {
    if (combines) smem.sums.expect(range.split, num_seq_splits, chunk.num_packed);
    target = smem.sums.target_of(lane / 4, range.split, num_seq_splits);
  }
  [[maybe_unused]] const bool owns_new = exists(seq.first_entry);
  [[maybe_unused]] const int new_page = page_of(args.tokens, slot, seq.first_entry);
#pragma unroll 1  // small code: code that runs once costs its instruction fetch
  for (int pass = 0; pass < 2; ++pass) {
    const bool now = is_old == (pass == 0);
    if (pass == 1) {
      ptx::pdl_wait();
      trace.stamp(1);
      if (!launches_early) ptx::pdl_launch();
    }
    if (now) fetch(buffers.keys[0].entries, kKeys, first, page);
    if (pass == 0) {
      smem.packed.template load<false, kDim>(args, chunk);
      if constexpr (Config::kRotary) {
        smem.fresh.template rotate_by<Config::kThreads>(rotary, seq.token_begin);
      }
      __syncthreads();
      if constexpr (!Config::kRotary) queries_copy.look_up(smem.packed);
    }
    if (now) {
      if (one_by_one) ptx::cp_async_wait<0>();
      fetch(buffers.values, kValues, first, page);
      if (one_by_one) ptx::cp_async_wait<0>();
      if (!lends_tile) fetch(next_keys, kKeys, second, next_page);
    }
  }
  if constexpr (Config::kRotary) {
    const int64_t offset = entry_offset<kDim>(args, new_page, chunk.kv_head, seq.first_entry);
    smem.fresh.template apply<Config::kThreads>(rotary, chunk, queries_tile, owns_new, offset);
  } else {
    queries_copy.copy(queries_tile, args.qkv);
  }
  __syncthreads();
  trace.stamp(2);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragment_a(queries[k16], queries_tile, 0, k16);
  __syncthreads();
  if (lends_tile) fetch(next_keys, kKeys, second, next_page);

  RowTile<Config::kColumns> state;  // state of the split: all rows, this warp's dimensions
  state.clear();
  int split = range.split, split_end = split_begin(split + 1);
#pragma unroll 1
  for (int i = 0; round_entry < range.entry_end;
       round_entry += Config::kRoundEntries, i ^= Config::kKeyBuffers - 1) {
    // In flight at this point: keys, values, and the keys of the next round.
    const int entry = round_entry + warp * kKvTile;
    page = next_page;
    next_page = page_of_kv_tile(round_entry + 2 * Config::kRoundEntries);
    ptx::cp_async_wait<2>();
    __syncwarp();
    SoftmaxState sums;
    float scores[1][1][kKvTileN8][4];
    [[maybe_unused]] const int new_row = seq.first_entry - entry;  // row of the new token
    [[maybe_unused]] const bool has_new = owns_new && new_row >= 0 && new_row < kKvTile;
    if constexpr (Config::kRotary) {
      if (has_new) put_row(buffers.keys[i].entries, new_row, smem.fresh.key, lane);
    }
    if (exists(entry)) {
      sums = score_kv_tile<Config>(scores, queries, smem, args, seq, i, warp, entry);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    if constexpr (Config::kRotary) {
      if (has_new) put_row(buffers.values, new_row, smem.fresh.value, lane);
    }
    if (exists(entry)) {
      multiply_kv_tile<Config>(scores[0][0], sums, smem, i, warp, lane);
    }
    __syncwarp();
    fetch(buffers.values, kValues, entry + Config::kRoundEntries, page);
    __syncthreads();
#pragma unroll 1  // small code, as above
    for (int u = 0; u < Config::kWarps; ++u) {
      if (!exists(round_entry + u * kKvTile)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = smem.states[u][half * 8 + lane / 4];
        sums.row_max[half] = v.x, sums.sum[half] = v.y;
      }
      float weight[2];
      begin_kv_tile(state, sums, weight);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float4 part = smem.warps[u].keys[i].acc[warp * (Config::kColumns / 8) + n][lane];
        add_weighted(state.acc[n], {part.x, part.y, part.z, part.w}, weight);
      }
    }
    __syncthreads();
    fetch(buffers.keys[i].entries, kKeys, entry + 2 * Config::kRoundEntries, next_page);
    if (round_entry + Config::kRoundEntries >= min(split_end, range.entry_end)) {
      if (combines) {
        if constexpr (Config::kCluster) {
          smem.sums.send(target, state, warp * Config::kColumns, lane, chunk.num_packed);
        }
      } else {
        write_split<kDim, Config::kSinks>(args, smem.packed, state, 0, warp * Config::kColumns,
                                          split, max_splits);
      }
      split_end = split_begin(++split + 1);
      state.clear();
    }
  }
  if constexpr (Config::kCluster) {
    if (combines) {
      smem.sums.template combine<Config::kWarps>(args, smem.packed, range.split, num_seq_splits,
                                                 chunk.num_packed);
    }
  }
  trace.stamp(3);
  trace.end();
}

}  // namespace
}  // namespace cpmcu::cuda
