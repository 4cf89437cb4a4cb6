// Attention of many rows, a tree's above all: a block has 64 packed rows, and its warps share them.
//
// Each warp does 16 rows and all units, one after another, with the state of the split in
// registers. Nothing is merged between warps. Bound: on Hopper a warp's own time between two
// products: a tile of 64 entries takes each of two blocks of an SM 2 us, of which the tensor cores
// need 0.6, and half the reads from L2 change nothing (wgmma reads a tile from shared memory once
// for four warps). Before, the fragments of K and V, of which every warp needs all: 16 KiB for 64
// mma. Blocks of a KV head that run side by side (blockIdx.x) find the entries in L2.
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
//
// Length of attention_many_rows_kernel: its steps are functions (many_rows_steps.cuh). What is left
// is the CTA's work range, the stages and the loop, which share all scalars.
#pragma once

#include "kernels/attention/many_rows_steps.cuh"

namespace cpmcu::cuda {
namespace {

// Grid: (chunks * KV heads, ranges, B).
template <typename Config, bool kByPosition>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_many_rows_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                               int num_chunks, int max_splits) {
  using T = typename Config::Element;
  using Smem = ManyRowsSmem<Config>;
  using StageTile = typename Smem::StageTile;
  constexpr int kDim = Config::kDim;
  constexpr int kStageEntries = Config::kStageEntries;
  // wgmma where it exists and a warpgroup has 64 rows. It adds up as mma.sync does, to the bit.
  // NOTE: for trees only, whose own entries are mma.sync's: where nothing else reads the queries
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

  const int slot = args.tokens.seq_slots[static_cast<int>(blockIdx.z)];
  int pages[Config::kStages];  // of the first tiles
  auto look_up = [&](int entry) {
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) {
      pages[i] = page_of(args.tokens, slot, entry + i * kStageEntries);
    }
  };
  look_up(split_begin(split_range_index()));
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const bool merges = Config::kMerges && kByPosition && merges_split_groups(args, seq);
  const SplitRange range = split_range_of_cta(args, seq, max_splits, merges, look_up);
  if (range.entry_begin >= range.entry_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }

  // Tiles that all rows see alike, and then, if the range reaches that far, those that hold the
  // tree as a whole, though it may begin before the range or go on behind it.
  int first_entry = range.entry_begin;  // of the first tile
  int num_tiles = (range.entry_end - range.entry_begin + kStageEntries - 1) / kStageEntries;
  int num_shared = num_tiles;
  const int tree_entry =
      kByPosition ? seq.length / kStageEntries * kStageEntries : 0;  // of the tree's first tile
  const bool meets_tree = kByPosition && range.entry_end > tree_entry;
  if (meets_tree) {
    num_shared = max(tree_entry - range.entry_begin, 0) / kStageEntries;
    num_tiles = num_shared + Config::kTreeTiles;
    if (tree_entry < first_entry) {
      first_entry = tree_entry;
      look_up(tree_entry);
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
  auto fetch_entries = [&](int tile, int entry, int page) {
    fetch_stage<Config>(stage_of(tile), args, seq, chunk.kv_head, entry, page);
  };

  auto fetch_first = [&](int tile, bool old) {
    const int entry = first_entry + tile * kStageEntries;
    if (tile < num_tiles && (entry + kStageEntries <= seq.first_entry) == old) {
      fetch_entries(tile, entry, pages[tile]);
    }
  };
  fetch_before_loop<Config, kByPosition>(smem, args, chunk, trace, fetch_first);
  trace.stamp(2);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    load_fragment_a(queries[k16], smem.queries(), warp_row, k16);
  }

  RowTile<Config::kColumns> state;  // of the split
  state.clear();

  auto attend = [&](int tile, int entry) {
    auto& stage = stage_of(tile);
    attend_tile<Config, kWgmma>(state, stage, smem, args, seq, queries, warp_row, column, entry);
  };

  int split = range.split, split_end = split_begin(split + 1);
  SoftmaxState group_state;  // of the splits of the run before this one
  bool group_has_splits = false;
  // If it has no entries from `entry` on.
  auto end_split = [&](int entry) {
    if (entry < min(split_end, range.entry_end)) return;
    if (merges) {
      const bool goes_on = (split + 1) % kSplitsPerGroup != 0 && entry < range.entry_end;
      merge_split<Config>(smem, state, group_state, group_has_splits, goes_on);
    }
    if (warp_has_rows && !group_has_splits) {
      const int place = merges ? split / kSplitsPerGroup * kSplitsPerGroup : split;
      write_split<kDim>(args, smem.packed, state, warp_row, column, place, max_splits);
    }
    split_end = split_begin(++split + 1);
    state.clear();
  };

  // So many tiles are on their way behind the one that is multiplied. The first stages are full.
  const int num_ahead = Config::kStages - 1 - merges;
  int entry = range.entry_begin, tile = 0, next_page = pages[Config::kStages - 1];
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
        fetch_entries(next, entry + num_ahead * kStageEntries, next_page);
      }
      next_page = page_of(args.tokens, slot, entry + (num_ahead + 1) * kStageEntries);
      ptx::cp_async_commit();
      if (kWgmma || warp_has_rows) attend(tile, entry);
      ++tile;
      entry += kStageEntries;
    } else if (meets_tree && entry < range.entry_end) {
      if (!has_tree) {
        await_tree<Config>(smem, num_shared, num_ahead,
                           [&](int tile, int entry) { fetch_entries(tile, entry, next_page); });
        has_tree = true;
      }
      if (warp_has_rows) {
        for_each_tree_token<Config>(smem, warp_row, entry, [&](int p) {
          attend_tree_token<Config>(
              state, smem, args, queries, lane, warp, warp_row, column, entry, p,
              [&](int i) -> typename Smem::Stage& { return stage_of(num_shared + i); });
        });
      }
      entry += kKvTile;
    } else {
      break;
    }
    end_split(entry);
  }
  trace.stamp(3);
  trace.end();
}

}  // namespace
}  // namespace cpmcu::cuda
