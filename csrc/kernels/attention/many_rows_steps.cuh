// The phases of many_rows.cuh: the shared memory of a CTA, and one function for each phase.
//
// A stage tile is one pipeline stage of keys or values: 64 entries, which are two KV tiles (one if
// D = 256).
//
// NOTE: functions take scalars by value and callables by reference. A callable by value changes the
// registers that ptxas 13.0 assigns to the main loop.
#pragma once

#include "kernels/attention/decode.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_ = false, bool kSinks_ = false>
struct ManyRowsConfig {
  using Element = T;
  static constexpr bool kSinks = kSinks_;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = kDim <= 128 ? kDim : 128;  // output dimensions of a warp
  // Warps with the same rows, each with other dimensions.
  static constexpr int kColumnWarps = kDim / kColumns;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps / kColumnWarps * kWarpRows;  // 64; 32 if D = 256
  static constexpr int kStageEntries = kDim <= 128 ? 64 : 32;      // entries of a stage tile
  static constexpr int kStages = kDim == 64 ? 4 : 3;
  static constexpr int kCtasPerSm = 2;
  // A tree may begin anywhere in a tile.
  static constexpr int kTreeTiles = kMaxTreeSize / kStageEntries + 1;
  // Split groups can be merged; this takes the last stage.
  static constexpr bool kMerges = kDim <= 128;
  static_assert(kTreeTiles <= kStages - kMerges, "the whole tree must fit shared memory");
  static_assert(kPageSize % kStageEntries == 0, "a stage tile must lie in one page");
};

template <typename Config>
struct ManyRowsSmem {
  using T = typename Config::Element;
  using StageTile = CacheTile<T, Config::kFp8, Config::kStageEntries, Config::kDim>;
  struct Stage {
    StageTile keys, values;
  };
  using Queries = SwizzledTile<T, Config::kRows, Config::kDim>;
  static_assert(sizeof(Queries) <= sizeof(Stage), "the queries must fit a stage");
  Stage stages[Config::kStages];
  PackedRows<Config::kRows> packed;
  Chunk chunk;  // only the tree phase reads it
  uint8_t paths[Config::kThreads / 32]
               [kMaxTreeSize];  // for each warp: the ancestors of a token in order

  // The queries use the stage that is filled last.
  __device__ __forceinline__ Queries& queries() {
    return reinterpret_cast<Queries&>(stages[Config::kStages - 1]);
  }
  // This thread's acc of the group's earlier splits, eight dimensions at a time. If split groups
  // are merged, it occupies the last stage.
  using GroupAcc = float4[Config::kColumns / 8][Config::kThreads];
  static_assert(!Config::kMerges || sizeof(GroupAcc) <= sizeof(Stage) || Config::kFp8);
  // An fp8 stage is too small for it.
  struct None {};
  std::conditional_t<Config::kMerges && Config::kFp8, GroupAcc, None> own_group_acc;
  __device__ __forceinline__ float4& group_acc(int n) {
    if constexpr (Config::kMerges && Config::kFp8) return own_group_acc[n][threadIdx.x];
    return reinterpret_cast<GroupAcc&>(stages[Config::kStages - 1])[n][threadIdx.x];
  }
};

// Adds a stage tile of 64 entries to the split by wgmma, which reads keys and values once for the
// 64 rows of four warps. KV tiles are added one after the other, as with mma.sync. hide(scores) is
// PackedRows::hide.
template <typename T, int kDim, typename Hide>
__device__ __forceinline__ void add_tile(RowTile<kDim>& state,
                                         const SwizzledTile<T, 64, kDim>& keys,
                                         const SwizzledTile<T, 64, kDim>& values,
                                         const uint32_t (&queries)[kDim / 16][4], float scale_log2,
                                         Hide hide) {
  constexpr int kKvTiles = 64 / kKvTile, kPanels = kDim / 64;  // panels of 64 dimensions
  using StageTile = SwizzledTile<T, 64, kDim>;
  constexpr int kPanel = StageTile::kPanelBytes / 16, kRow = StageTile::kRowBytes / 16;
  const uint64_t key_rows = ptx::wgmma_descriptor_swizzle128(keys.address(0, 0));
  const uint64_t value_rows = ptx::wgmma_descriptor_swizzle128(values.address(0, 0));
  float all[kKvTiles * kKvTileN8][4];
  ptx::wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    ptx::wgmma_64xNx16<T, 8>(all, queries[k16], key_rows + k16 / 4 * kPanel + k16 % 4 * 2, k16 > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  float scores[kKvTiles][1][kKvTileN8][4];
#pragma unroll
  for (int n = 0; n < kKvTiles * kKvTileN8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n / kKvTileN8][0][n % kKvTileN8][i] = all[n][i];
  }
  hide(scores);

  // Phase 1: probabilities of all KV tiles. Phase 2: values. While one GEMM over a panel runs, the
  // results of the previous one are added.
  SoftmaxState sums[kKvTiles];
  uint32_t p[kKvTiles][kKvTileN8 / 2][4];
#pragma unroll
  for (int kv_tile = 0; kv_tile < kKvTiles; ++kv_tile) {
    sums[kv_tile] = softmax_of_kv_tile(scores[kv_tile][0], scale_log2);
    pack_kv_tile<T>(p[kv_tile], scores[kv_tile][0]);
  }
  float acc[2][8][4];
  const auto multiply = [&](int i) {
    const int kv_tile = i / kPanels, panel = i % kPanels;
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kKvTileN8 / 2; ++k16) {
      const uint64_t rows = value_rows + panel * kPanel + (kv_tile * kKvTile + k16 * 16) * kRow;
      ptx::wgmma_64xNx16<T, 8, true>(acc[i % 2], p[kv_tile][k16], rows, k16 > 0);
    }
    ptx::wgmma_commit();
  };
  multiply(0);
  multiply(1);
  constexpr int kGemms = kKvTiles * kPanels;
  float factor[2], weight[2];
#pragma unroll
  for (int i = 0; i < kGemms; ++i) {
    const int kv_tile = i / kPanels, panel = i % kPanels;
    if (panel == 0) weigh(state, sums[kv_tile], factor, weight);
    i + 1 < kGemms ? ptx::wgmma_wait<1>() : ptx::wgmma_wait<0>();
    if (is_not_one(factor)) state.template multiply<8>(factor, panel * 8);
#pragma unroll
    for (int n = 0; n < 8; ++n) add_weighted(state.acc[panel * 8 + n], acc[i % 2][n], weight);
    if (i + 2 < kGemms) multiply(i + 2);
  }
}

// Leaves probabilities as they are.
struct NoScale {
  __device__ __forceinline__ void operator()(float (&)[kKvTileN8][4]) const {}
};

// Adds a KV tile to the split: its scores, and its values from dimension `column` on. scale_values
// multiplies probabilities by the scales of an fp8 cache.
template <typename T, int kColumns, typename LoadValues, typename ScaleValues = NoScale>
__device__ __forceinline__ void add_kv_tile(RowTile<kColumns>& state, float (&scores)[kKvTileN8][4],
                                            float scale_log2, int column, LoadValues load_values,
                                            ScaleValues scale_values = {}) {
  const SoftmaxState kv_tile = softmax_of_kv_tile(scores, scale_log2);
  scale_values(scores);
  float weight[2];
  begin_kv_tile(state, kv_tile, weight);
  multiply_kv_tile_values<T, kColumns>(
      scores, [&](uint32_t (&v)[4], int k16, int n16) { load_values(v, k16, column / 16 + n16); },
      [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) add_weighted(state.acc[2 * n16 + n], acc[n], weight);
      });
}

// The shared-memory addresses of the KV tile from `entry` on, for one token of the tree. The tile
// holds entries before the tree, then the token's ancestors in order.
template <typename Config>
struct AncestorEntries {
  using StageTile = typename ManyRowsSmem<Config>::StageTile;
  uint32_t key[kKvTile / 16], value[kKvTile / 16];  // addresses that the lane passes to ldmatrix
  float key_scale, value_scale;  // fp8 only: the scales of entry `lane` of the tile

  // For the token of packed row p. look_up(entry, use) calls use(stage, row) for an entry's place.
  template <typename LookUp>
  __device__ __forceinline__ AncestorEntries(const ManyRowsSmem<Config>& smem,
                                             uint8_t (&path)[kMaxTreeSize], int lane, int entry,
                                             int p, int length, LookUp look_up) {
    const uint64_t mask = smem.packed.masks[p];
    const uint32_t low = static_cast<uint32_t>(mask), high = static_cast<uint32_t>(mask >> 32);
    const uint32_t before = (1u << lane) - 1;
    __syncwarp();  // the previous token's path is no longer read
    if (low >> lane & 1) path[__popc(low & before)] = lane;
    if (high >> lane & 1) path[__popc(low) + __popc(high & before)] = 32 + lane;
    __syncwarp();
    const int position = entry + lane;
    const int from = position < length                ? position
                     : position < smem.packed.ends[p] ? length + path[position - length]
                                                      : length;  // arbitrary: masked
    uint32_t lane_entry;
    look_up(from, [&](const auto& stage, int row) {
      lane_entry = stage.keys.address(row, 0);
      if constexpr (Config::kFp8) {
        key_scale = stage.keys.scales[row], value_scale = stage.values.scales[row];
      }
    });
    if constexpr (Config::kFp8) {
      key[0] = lane_entry;
      value[0] = lane_entry + static_cast<uint32_t>(sizeof(StageTile));
    } else {
#pragma unroll
      for (int i = 0; i < kKvTile / 16; ++i) {
        key[i] = __shfl_sync(0xffffffffu, lane_entry, i * 16 + lane / 16 * 8 + lane % 8) ^
                 (lane / 8 % 2 * 16);
        value[i] = (__shfl_sync(0xffffffffu, lane_entry, i * 16 + lane % 16) +
                    static_cast<uint32_t>(sizeof(StageTile))) ^
                   (lane / 16 * 16);
      }
    }
  }

  // The fragments of keys and of values, as multiply_keys and multiply_kv_tile_values load them.
  __device__ __forceinline__ auto keys() const {
    if constexpr (Config::kFp8) {
      return Fp8Keys<typename Config::Element, StageTile>{key[0], {}};
    } else {
      return [this](uint32_t (&k)[4], int n16, int k16) {
        ptx::ldmatrix4(k, StageTile::further(key[n16], k16 * 2));
      };
    }
  }
  __device__ __forceinline__ auto values() const {
    if constexpr (Config::kFp8) {
      return Fp8Values<typename Config::Element, StageTile>{value[0], {}};
    } else {
      return [this](uint32_t (&v)[4], int k16, int n16) {
        ptx::ldmatrix4_trans(v, StageTile::further(value[k16], n16 * 2));
      };
    }
  }
  // Multiplies columns by the scales of their entries; `of_lane` is the scale of entry `lane`.
  __device__ __forceinline__ void scale(float (&x)[kKvTileN8][4], float of_lane) const {
    scale_columns_by_lane<typename Config::Element>(x, of_lane);
  }
};

// The entries of AncestorEntries that each of a lane's rows sees. If `all`, these are entries
// before the tree, and every row sees them. Otherwise only rows of p's token see them.
template <typename Config>
__device__ __forceinline__ void look_up_seen(uint32_t (&sees)[2], const ManyRowsSmem<Config>& smem,
                                             const AttentionArgs<typename Config::Element>& args,
                                             int lane, int entry, int p, int warp_row, bool all) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = warp_row + half * 8 + lane / 4;
    const int num_entries = smem.packed.ends[own] - entry;
    const bool any = num_entries > 0 && (all || smem.packed.tokens[own] == smem.packed.tokens[p]);
    sees[half] = any ? ~0u >> max(kKvTile - num_entries, 0) : 0;
    if (args.window > 0) {
      sees[half] &= ~static_cast<uint32_t>(first_entries(smem.packed.window_begins[own] - entry));
    }
  }
}

// Stores a split's state, which now includes all splits of the group so far.
template <typename Config>
__device__ __forceinline__ void park_split_group(ManyRowsSmem<Config>& smem,
                                                 SoftmaxState& group_state,
                                                 const RowTile<Config::kColumns>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    group_state.row_max[half] = state.row_max[half], group_state.sum[half] = state.sum[half];
  }
#pragma unroll
  for (int n = 0; n < Config::kColumns / 8; ++n) {
    const float (&acc)[4] = state.acc[n];
    smem.group_acc(n) = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
}

// Adds a stage tile, whose first entry is `entry`, to the states of a warp's rows.
template <typename Config, bool kWgmma>
__device__ __forceinline__ void attend_tile(RowTile<Config::kColumns>& state,
                                            typename ManyRowsSmem<Config>::Stage& stage,
                                            ManyRowsSmem<Config>& smem,
                                            const AttentionArgs<typename Config::Element>& args,
                                            const Sequence& seq,
                                            const uint32_t (&queries)[Config::kDim / 16][4],
                                            int warp_row, int column, int entry) {
  using T = typename Config::Element;
  if constexpr (kWgmma) {
    add_tile<T>(state, stage.keys, stage.values, queries, args.scale_log2,
                [&](auto& scores) { smem.packed.hide(scores, args, seq, warp_row, entry); });
  } else {
    constexpr int kKvTiles = Config::kStageEntries / kKvTile;
    float scores[kKvTiles][1][kKvTileN8][4];
#pragma unroll
    for (int kv_tile = 0; kv_tile < kKvTiles; ++kv_tile) {
      multiply_keys<T>(scores[kv_tile], stage.keys, kv_tile * kKvTile,
                       [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
                         for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
                       });
      scale_columns<T>(scores[kv_tile][0], stage.keys, kv_tile * kKvTile);
    }
    smem.packed.hide(scores, args, seq, warp_row, entry);
#pragma unroll
    for (int kv_tile = 0; kv_tile < kKvTiles; ++kv_tile) {
      add_kv_tile<T>(state, scores[kv_tile][0], args.scale_log2, column,
                     values_from(stage.values, kv_tile * kKvTile), [&](float (&p)[kKvTileN8][4]) {
                       scale_columns<T>(p, stage.values, kv_tile * kKvTile);
                     });
    }
  }
}

struct AllRows {
  __device__ __forceinline__ void operator()(uint32_t (&)[2]) const {}
};

// Adds the KV tile of `entries` to the states of the rows that see it (look_up_seen). keep(sees)
// clears those of the lane's two rows that do not take part.
template <typename Config, typename Keep = AllRows>
__device__ __forceinline__ void attend_ancestors(
    RowTile<Config::kColumns>& state, const AncestorEntries<Config>& entries,
    const ManyRowsSmem<Config>& smem, const AttentionArgs<typename Config::Element>& args,
    const uint32_t (&queries)[Config::kDim / 16][4], int lane, int entry, int p, int warp_row,
    int column, bool all, Keep keep = {}) {
  using T = typename Config::Element;
  float scores[1][kKvTileN8][4];
  multiply_keys<T, Config::kDim>(
      scores,
      [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
      },
      entries.keys());
  if constexpr (Config::kFp8) entries.scale(scores[0], entries.key_scale);
  uint32_t sees[2];
  look_up_seen<Config>(sees, smem, args, lane, entry, p, warp_row, all);
  keep(sees);
  mask_scores(scores[0], sees);
  add_kv_tile<T>(state, scores[0], args.scale_log2, column, entries.values(),
                 [&](float (&p)[kKvTileN8][4]) {
                   if constexpr (Config::kFp8) entries.scale(p, entries.value_scale);
                 });
}

// Starts the copy of a stage tile from `entry` on. The tile lies in one page.
template <typename Config>
__device__ __forceinline__ void fetch_stage(typename ManyRowsSmem<Config>::Stage& stage,
                                            const AttentionArgs<typename Config::Element>& args,
                                            const Sequence& seq, int kv_head, int entry, int page) {
  const int64_t offset = entry_offset<Config::kDim>(args, page, kv_head, entry);
  fetch_cache<Config::kThreads>(stage.keys, args, kKeys, offset, seq.end() - entry, threadIdx.x);
  fetch_cache<Config::kThreads>(stage.values, args, kValues, offset, seq.end() - entry,
                                threadIdx.x);
}

// Adds the KV tile from `entry` on for the tree token of packed row p: entries before the tree,
// then the token's ancestors in order. If the tile ends before the tree, it is added for all rows.
// tree_stage(i) is the stage of tile i of the tree.
template <typename Config, typename TreeStage>
__device__ __forceinline__ void attend_tree_token(
    RowTile<Config::kColumns>& state, ManyRowsSmem<Config>& smem,
    const AttentionArgs<typename Config::Element>& args,
    const uint32_t (&queries)[Config::kDim / 16][4], int lane, int warp, int warp_row, int column,
    int entry, int p, TreeStage tree_stage) {
  constexpr int kStageEntries = Config::kStageEntries;
  // The length is read from shared memory again, which saves a register of the main loop.
  const int length = smem.chunk.seq.length;
  const int tree_entry = length / kStageEntries * kStageEntries;
  const bool all = entry + kKvTile <= length;
  auto& path = smem.paths[warp];
  const AncestorEntries<Config> entries(
      smem, path, lane, entry, p, length, [&](int from, auto use) {
        use(tree_stage((from - tree_entry) / kStageEntries), (from - tree_entry) % kStageEntries);
      });
  attend_ancestors<Config>(state, entries, smem, args, queries, lane, entry, p, warp_row, column,
                           all);
}

// Calls attend(p) for each tree token of the warp's rows, for the KV tile from `entry` on. p is the
// token's first packed row. If the tile ends before the tree, one call serves all tokens.
template <typename Config, typename Attend>
__device__ __forceinline__ void for_each_tree_token(const ManyRowsSmem<Config>& smem, int warp_row,
                                                    int entry, Attend attend) {
  const Chunk& chunk = smem.chunk;
  const int end = min(warp_row + kWarpRows, chunk.num_packed - chunk.first);
  for (int p = warp_row; p < end; p = (smem.packed.tokens[p] + 1) * chunk.group - chunk.first) {
    if (entry >= smem.packed.ends[p]) continue;
    attend(p);
    if (entry + kKvTile <= chunk.seq.length) return;
  }
}

// Fills all stages but the last, which receives the queries. fetch_first(tile, old) starts the copy
// of a tile. With old = true it copies only tiles whose entries are all of earlier steps. These do
// not wait for the previous kernel (core/launch.h). With old = false it copies the others.
template <typename Config, bool kByPosition, typename FetchFirst>
__device__ __forceinline__ void fetch_before_loop(
    ManyRowsSmem<Config>& smem, const AttentionArgs<typename Config::Element>& args,
    const Chunk& chunk, Trace& trace, const FetchFirst& fetch_first) {
  using T = typename Config::Element;
#pragma unroll
  for (int tile = 0; tile < Config::kStages - 1; ++tile) fetch_first(tile, true);
  smem.packed.template load<kByPosition, Config::kDim>(args, chunk);
  if (threadIdx.x == 0) smem.chunk = chunk;
  __syncthreads();
  QueryCopy<Config::kThreads, T, Config::kRows, Config::kDim> queries_copy;
  queries_copy.look_up(smem.packed);
  ptx::pdl_wait();
  trace.stamp(1);
  ptx::pdl_launch();
#pragma unroll
  for (int tile = 0; tile < Config::kStages - 1; ++tile) {
    fetch_first(tile, false);
    if (tile == 0) queries_copy.start(smem.queries(), args.qkv);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<Config::kStages - 2>();
  __syncthreads();
}

// Merges the group's earlier splits into a split's state. If the group has more splits, stores the
// state.
template <typename Config>
__device__ __forceinline__ void merge_split(ManyRowsSmem<Config>& smem,
                                            RowTile<Config::kColumns>& state,
                                            SoftmaxState& group_state, bool& group_has_splits,
                                            bool goes_on) {
  if (group_has_splits)
    add_to_split_group(state, group_state, [&](int n) { return smem.group_acc(n); });
  group_has_splits = goes_on;
  if (group_has_splits) park_split_group<Config>(smem, group_state, state);
}

// Waits for the tree's tiles. The copy of the last one may still need a free stage.
template <typename Config, typename Fetch>
__device__ __forceinline__ void await_tree(const ManyRowsSmem<Config>& smem, int num_shared,
                                           int num_ahead, const Fetch& fetch) {
  constexpr int kStageEntries = Config::kStageEntries;
  const int last = num_shared + Config::kTreeTiles - 1;
  if (Config::kTreeTiles > num_ahead && last >= Config::kStages - 1) {
    __syncthreads();
    const int tree_entry = smem.chunk.seq.length / kStageEntries * kStageEntries;
    fetch(last, tree_entry + (Config::kTreeTiles - 1) * kStageEntries);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
}

}  // namespace
}  // namespace cpmcu::cuda
