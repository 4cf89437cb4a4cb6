// Attention of many rows, a tree's above all: a block has 64 packed rows, and its warps share them.
//
// Each warp does 16 rows and all units, one after another, with the state of the split in
// registers. Nothing is merged between warps. Bound: on Hopper a warp's own time between two
// products: a tile of 64 cells takes each of two blocks of an SM 2 us, of which the tensor cores
// need 0.6, and half the reads from L2 change nothing (wgmma reads a tile from shared memory once
// for four warps). Before, the fragments of K and V, of which every warp needs all: 16 KiB for 64
// mma. Blocks of a KV head that run side by side (blockIdx.x) find the cells in L2.
//
// by_position: units that end before the tree are shared by its rows. The others, one or a few, are
// done for each row of the tree in turn, the others masked: the tree lies in shared memory, and
// ldmatrix takes an address from each lane, so a row's ancestors are read in the order of their
// depth as if they lay where plain decoding has them. It is the same code on the same numbers, so
// the bits are the same.
//
// Surprising: from about half a run a range on (merge_from) the states of a run's splits are summed
// here, in the place of a stage, instead of being written and read again by the combine kernel: of
// 32 rows of 32 heads a split's are half a megabyte.
#pragma once

#include "kernels/attention/decode.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_>
struct ManyRowsConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = kDim <= 128 ? kDim : 128;  // of the output, that a warp adds up
  static constexpr int kColumnWarps = kDim / kColumns;       // warps that share rows
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps / kColumnWarps * kWarpRows;  // 64, 32 for D = 256
  static constexpr int kCells = kDim <= 128 ? 64 : 32;             // of a tile
  static constexpr int kStages = kDim == 64 ? 4 : 3;
  static constexpr int kBlocks = 2;                             // on one SM
  static constexpr int kTreeTiles = kMaxTreeSize / kCells + 1;  // a tree may begin anywhere in one
  static constexpr bool kMerges = kDim <= 128;  // runs, in the place of the last stage
  static_assert(kTreeTiles <= kStages - kMerges, "a tree is in shared memory as a whole");
  static_assert(kPageSize % kCells == 0, "a tile of cells lies in one page");
};

template <typename Config>
struct ManyRowsSmem {
  using T = typename Config::Element;
  using Cells = SwizzledTile<T, Config::kCells, Config::kDim>;
  struct Stage {
    Cells keys, values;
  };
  using Queries = SwizzledTile<T, Config::kRows, Config::kDim>;
  static_assert(sizeof(Queries) <= sizeof(Stage), "the queries come through a stage");
  Stage stages[Config::kStages];
  PackedRows<Config::kRows> packed;
  Chunk chunk;                                         // for the tree
  uint8_t paths[Config::kThreads / 32][kMaxTreeSize];  // of a warp's row: its ancestors in order

  // In the stage that is filled last.
  __device__ __forceinline__ Queries& queries() {
    return reinterpret_cast<Queries&>(stages[Config::kStages - 1]);
  }
  // What this thread has of the run before the present split, where runs are merged: eight
  // dimensions after another. The last stage is then none.
  using Run = float4[Config::kColumns / 8][Config::kThreads];
  static_assert(!Config::kMerges || sizeof(Run) <= sizeof(Stage));
  __device__ __forceinline__ float4& of_run(int n) {
    return reinterpret_cast<Run&>(stages[Config::kStages - 1])[n][threadIdx.x];
  }
};

// A tile of 64 cells by wgmma, which reads keys and values once for the 64 rows of four warps:
// those of the cells' units one after another, as mma.sync would. hide(scores) as of PackedRows.
template <typename T, int kDim, typename Hide>
__device__ __forceinline__ void add_tile(RowTile<kDim>& state,
                                         const SwizzledTile<T, 64, kDim>& keys,
                                         const SwizzledTile<T, 64, kDim>& values,
                                         const uint32_t (&queries)[kDim / 16][4], float scale_log2,
                                         Hide hide) {
  constexpr int kUnits = 64 / kUnit, kPanels = kDim / 64;  // of 64 dimensions
  using Cells = SwizzledTile<T, 64, kDim>;
  constexpr int kPanel = Cells::kPanelBytes / 16, kRow = Cells::kRowBytes / 16;
  const uint64_t key_rows = ptx::wgmma_descriptor_swizzle128(keys.address(0, 0));
  const uint64_t value_rows = ptx::wgmma_descriptor_swizzle128(values.address(0, 0));
  float all[kUnits * kUnitTiles][4];
  ptx::wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    ptx::wgmma_64xNx16<T, 8>(all, queries[k16], key_rows + k16 / 4 * kPanel + k16 % 4 * 2, k16 > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  float scores[kUnits][1][kUnitTiles][4];
#pragma unroll
  for (int n = 0; n < kUnits * kUnitTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n / kUnitTiles][0][n % kUnitTiles][i] = all[n][i];
  }
  hide(scores);

  // The probabilities of all units first, so that there is something to do while one waits; then a
  // panel's products run while those of the one before are added.
  UnitState sums[kUnits];
  uint32_t p[kUnits][kUnitTiles / 2][4];
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    sums[unit] = softmax_of_unit(scores[unit][0], scale_log2);
    pack_unit<T>(p[unit], scores[unit][0]);
  }
  float acc[2][8][4];
  const auto multiply = [&](int i) {
    const int unit = i / kPanels, panel = i % kPanels;
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kUnitTiles / 2; ++k16) {
      const uint64_t rows = value_rows + panel * kPanel + (unit * kUnit + k16 * 16) * kRow;
      ptx::wgmma_64xNx16<T, 8, true>(acc[i % 2], p[unit][k16], rows, k16 > 0);
    }
    ptx::wgmma_commit();
  };
  multiply(0);
  multiply(1);
  constexpr int kProducts = kUnits * kPanels;
  float factor[2], weight[2];
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int unit = i / kPanels, panel = i % kPanels;
    if (panel == 0) weigh(state, sums[unit], factor, weight);
    i + 1 < kProducts ? ptx::wgmma_wait<1>() : ptx::wgmma_wait<0>();
    if (is_not_one(factor)) state.template multiply<8>(factor, panel * 8);
#pragma unroll
    for (int n = 0; n < 8; ++n) add_weighted(state.acc[panel * 8 + n], acc[i % 2][n], weight);
    if (i + 2 < kProducts) multiply(i + 2);
  }
}

// Grid: (chunks * KV heads, ranges, B).
template <typename Config, bool kByPosition>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    attention_many_rows_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                               int num_chunks, int max_splits) {
  using T = typename Config::Element;
  using Smem = ManyRowsSmem<Config>;
  using Cells = typename Smem::Cells;
  constexpr int kDim = Config::kDim;
  constexpr int kCells = Config::kCells;
  // wgmma where it exists and a warpgroup has 64 rows. It adds up as mma.sync does, to the bit.
  // NOTE: for trees only, whose own cells are mma.sync's: where nothing else reads the queries
  // ptxas 13.0 puts probabilities into their registers (D = 64), though the next tile wants them
  // again.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kWgmma = kByPosition && Config::kColumnWarps == 1;
#else
  constexpr bool kWgmma = false;
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);
  Trace trace;

  const int slot = args.rows.seq_slots[static_cast<int>(blockIdx.z)];
  int pages[Config::kStages];  // of the first tiles
  auto look_up = [&](int cell) {
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) {
      pages[i] = page_of(args.rows, slot, cell + i * kCells);
    }
  };
  look_up(split_begin(range_index()));
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const bool merges = Config::kMerges && kByPosition && merges_runs(args, seq);
  const Range range = range_of_block(args, seq, max_splits, merges, look_up);
  if (range.cell_begin >= range.cell_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }

  // Tiles that all rows see alike, and then, if the range reaches that far, those that hold the
  // tree as a whole, though it may begin before the range or go on behind it.
  int first_cell = range.cell_begin;  // of the first tile
  int num_tiles = (range.cell_end - range.cell_begin + kCells - 1) / kCells;
  int num_shared = num_tiles;
  const int tree_cell = kByPosition ? seq.length / kCells * kCells : 0;  // of the tree's first tile
  const bool meets_tree = kByPosition && range.cell_end > tree_cell;
  if (meets_tree) {
    num_shared = max(tree_cell - range.cell_begin, 0) / kCells;
    num_tiles = num_shared + Config::kTreeTiles;
    if (tree_cell < first_cell) {
      first_cell = tree_cell;
      look_up(tree_cell);
    }
  }

  const int lane = threadIdx.x % 32;
  const int warp = ptx::uniform_warp();
  const int warp_row = warp / Config::kColumnWarps * kWarpRows;  // within the chunk
  const int column = warp % Config::kColumnWarps * Config::kColumns;
  const bool warp_has_rows = chunk.first + warp_row < chunk.num_packed;

  const auto stage_of = [&](int tile) -> typename Smem::Stage& {
    const int without_last = tile % (Config::kStages - 1);
    return smem.stages[merges ? without_last : tile % Config::kStages];
  };
  auto fetch_cells = [&](int tile, int cell, int page) {
    auto& stage = stage_of(tile);
    const int64_t offset = cell_offset<kDim>(args, page, chunk.kv_head, cell);
    fetch_tile<Config::kThreads>(stage.keys, args.k_cache + offset, kDim, seq.end() - cell);
    fetch_tile<Config::kThreads>(stage.values, args.v_cache + offset, kDim, seq.end() - cell);
  };

  // Cells of earlier steps need not wait for this one's (core/launch.h).
  auto fetch_first = [&](int tile, bool old) {
    const int cell = first_cell + tile * kCells;
    if (tile < num_tiles && (cell + kCells <= seq.first_cell) == old) {
      fetch_cells(tile, cell, pages[tile]);
    }
  };
#pragma unroll
  for (int tile = 0; tile < Config::kStages - 1; ++tile) fetch_first(tile, true);
  smem.packed.template load<kByPosition, kDim>(args, chunk);
  if (threadIdx.x == 0) smem.chunk = chunk;
  __syncthreads();
  QueryCopy<Config::kThreads, T, Config::kRows, kDim> queries_copy;
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
  trace.stamp(2);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    load_fragment_a(queries[k16], smem.queries(), warp_row, k16);
  }
  auto load_q = [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[0][i] = queries[k16][i];
  };

  RowTile<Config::kColumns> state;  // of the split
  state.clear();
  auto add_unit = [&](float (&scores)[1][kUnitTiles][4], auto load_values) {
    const UnitState unit = softmax_of_unit(scores[0], args.scale_log2);
    float weight[2];
    begin_unit(state, unit, weight);
    multiply_unit_values<T, Config::kColumns>(
        scores[0],
        [&](uint32_t (&v)[4], int k16, int n16) { load_values(v, k16, column / 16 + n16); },
        [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
          for (int n = 0; n < 2; ++n) add_weighted(state.acc[2 * n16 + n], acc[n], weight);
        });
  };

  auto attend = [&](int tile, int cell) {
    auto& stage = stage_of(tile);
    if constexpr (kWgmma) {
      add_tile<T>(state, stage.keys, stage.values, queries, args.scale_log2,
                  [&](auto& scores) { smem.packed.hide(scores, args, seq, warp_row, cell); });
    } else {
      constexpr int kUnits = kCells / kUnit;
      float scores[kUnits][1][kUnitTiles][4];
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        multiply_keys<T>(scores[unit], stage.keys, unit * kUnit, load_q);
      }
      smem.packed.hide(scores, args, seq, warp_row, cell);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        add_unit(scores[unit], [&](uint32_t (&v)[4], int k16, int n16) {
          load_fragment_values(v, stage.values, unit * kUnit + k16 * 16, n16);
        });
      }
    }
  };

  // Adds the unit from `cell` on for the row of the tree that packed row p belongs to. It sees the
  // cells before the tree and then its ancestors in order. If the unit ends before the tree, for
  // all rows. From the tree's tiles.
  [[maybe_unused]] auto attend_alone = [&](int cell, int p) {
    const int length = smem.chunk.seq.length;  // the main loop leaves no registers for it
    const int tree_cell = length / kCells * kCells;
    const bool all = cell + kUnit <= length;
    auto& path = smem.paths[warp];
    const uint64_t mask = smem.packed.masks[p];
    const uint32_t low = static_cast<uint32_t>(mask), high = static_cast<uint32_t>(mask >> 32);
    const uint32_t before = (1u << lane) - 1;
    __syncwarp();  // the row before has been looked up
    if (low >> lane & 1) path[__popc(low & before)] = lane;
    if (high >> lane & 1) path[__popc(low) + __popc(high & before)] = 32 + lane;
    __syncwarp();
    const int position = cell + lane;
    const int from = position < length                ? position
                     : position < smem.packed.ends[p] ? length + path[position - length]
                                                      : length;  // any: it is masked
    const int tile = num_shared + (from - tree_cell) / kCells;
    const uint32_t lane_cell = stage_of(tile).keys.address((from - tree_cell) % kCells, 0);
    uint32_t key[kUnit / 16], value[kUnit / 16];
#pragma unroll
    for (int i = 0; i < kUnit / 16; ++i) {
      key[i] = __shfl_sync(0xffffffffu, lane_cell, i * 16 + lane / 16 * 8 + lane % 8) ^
               (lane / 8 % 2 * 16);
      value[i] = (__shfl_sync(0xffffffffu, lane_cell, i * 16 + lane % 16) +
                  static_cast<uint32_t>(sizeof(typename Smem::Stage) / 2)) ^
                 (lane / 16 * 16);
    }
    float scores[1][kUnitTiles][4];
    multiply_keys<T, kDim>(scores, load_q, [&](uint32_t (&k)[4], int n16, int k16) {
      ptx::ldmatrix4(k, Cells::further(key[n16], k16 * 2));
    });
    uint32_t sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = warp_row + half * 8 + lane / 4;
      const int num_cells = smem.packed.ends[own] - cell;
      const bool any = num_cells > 0 && (all || smem.packed.rows[own] == smem.packed.rows[p]);
      sees[half] = any ? ~0u >> max(kUnit - num_cells, 0) : 0;
      if (args.window > 0) {
        sees[half] &= ~static_cast<uint32_t>(first_cells(smem.packed.window_begins[own] - cell));
      }
    }
    mask_scores(scores[0], sees);
    add_unit(scores, [&](uint32_t (&v)[4], int k16, int n16) {
      ptx::ldmatrix4_trans(v, Cells::further(value[k16], n16 * 2));
    });
  };

  // The unit from `cell` on, in the tree's tiles, for all rows of the warp.
  [[maybe_unused]] auto attend_tree = [&](int cell) {
    const Chunk& chunk = smem.chunk;
    const int end = min(warp_row + kWarpRows, chunk.num_packed - chunk.first);
    for (int p = warp_row; p < end; p = (smem.packed.rows[p] + 1) * chunk.group - chunk.first) {
      if (cell >= smem.packed.ends[p]) continue;
      attend_alone(cell, p);
      if (cell + kUnit <= chunk.seq.length) return;
    }
  };

  int split = range.split, split_end = split_begin(split + 1);
  UnitState run;  // of the splits of the run before this one
  bool run_has_splits = false;
  // If it has no cells from `cell` on.
  auto end_split = [&](int cell) {
    if (cell < min(split_end, range.cell_end)) return;
    if (merges) {
      if (run_has_splits) add_to_run(state, run, [&](int n) { return smem.of_run(n); });
      run_has_splits = (split + 1) % kSplitsOfRun != 0 && cell < range.cell_end;
      if (run_has_splits) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          run.reference[half] = state.reference[half], run.sum[half] = state.sum[half];
        }
#pragma unroll
        for (int n = 0; n < Config::kColumns / 8; ++n) {
          const float (&acc)[4] = state.acc[n];
          smem.of_run(n) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        }
      }
    }
    if (warp_has_rows && !run_has_splits) {
      const int place = merges ? split / kSplitsOfRun * kSplitsOfRun : split;
      write_split<kDim>(args, smem.packed, state, warp_row, column, place, max_splits);
    }
    split_end = split_begin(++split + 1);
    state.clear();
  };

  // So many tiles are on their way behind the one that is multiplied. The first stages are full.
  const int num_ahead = Config::kStages - 1 - merges;
  int cell = range.cell_begin, tile = 0, next_page = pages[Config::kStages - 1];
  [[maybe_unused]] bool has_tree = false;  // in shared memory
#pragma unroll 1
  while (true) {
    if (tile < num_shared) {
      if (merges && tile > 0) {
        ptx::cp_async_wait<std::max(Config::kStages - 3, 0)>();
      } else {
        ptx::cp_async_wait<Config::kStages - 2>();
      }
      if constexpr (kWgmma) ptx::shared_copy_fence();
      __syncthreads();  // this tile is here, and everyone is done with the one before
      const int next = tile + num_ahead;
      if (next >= Config::kStages - 1 && next < num_tiles) {
        fetch_cells(next, cell + num_ahead * kCells, next_page);
      }
      next_page = page_of(args.rows, slot, cell + (num_ahead + 1) * kCells);
      ptx::cp_async_commit();
      if (kWgmma || warp_has_rows) attend(tile, cell);
      ++tile;
      cell += kCells;
    } else if (meets_tree && cell < range.cell_end) {
      if (!has_tree) {
        const int last = num_shared + Config::kTreeTiles - 1;  // which may wait for a stage
        if (Config::kTreeTiles > num_ahead && last >= Config::kStages - 1) {
          __syncthreads();
          const int tree_cell = smem.chunk.seq.length / kCells * kCells;
          fetch_cells(last, tree_cell + (Config::kTreeTiles - 1) * kCells, next_page);
          ptx::cp_async_commit();
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        has_tree = true;
      }
      if (warp_has_rows) attend_tree(cell);
      cell += kUnit;
    } else {
      break;
    }
    end_split(cell);
  }
  trace.stamp(3);
  trace.end();
}

}  // namespace
}  // namespace cpmcu::cuda
