// attention_decode for more than 16 packed rows of a KV head, and for verified trees. A CTA has 64
// packed rows (32 if D = 256). Its warps share the rows: each has an m16 tile.
//
// Roofline: a warp's own latency between two GEMMs. A stage tile (64 entries) takes 2 us in each of
// two CTAs of an SM on Hopper; the tensor cores need 0.6 us of them. With mma.sync, shared memory
// limits: each warp reads all fragments of K and V, 16 KiB for 64 mma. With wgmma, four warps share
// one read. CTAs of a KV head run side by side (blockIdx.x) and find the entries in L2.
//
// Schedule: a warp takes all KV tiles of the CTA's split range in order and keeps the state of the
// split in registers. Warps never exchange states.
//
//   shared tiles  below the tree: one stage tile at a time, for all tokens
//   tree tiles    by_position only: all tiles of the tree stay in shared memory. For each token
//                 of the tree, the warp reads the token's ancestors in the order of depth. Rows of
//                 other tokens are masked.
//
// ldmatrix takes one address from each lane, so the ancestors are read without a copy. Entries and
// their order are those of plain decoding, so the bits are the same.
//
// Surprising: if a range has about half a split group or more (merge_from), the CTA sums the splits
// of each group itself. A stage holds the sum. This saves writing and reading partial results: half
// a megabyte for each split of 32 tokens of 32 heads.
//
// Length of attention_many_rows_kernel: its phases are functions (many_rows_steps.cuh). The rest is
// the CTA's split range, the stages and the main loop, which share all scalars.
#pragma once

#include "kernels/attention/many_rows_steps.cuh"

namespace cpmcu::cuda {
namespace {

// Grid: (chunks of packed rows * KV heads, split ranges, B).
template <typename Config, bool kByPosition>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_many_rows_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                               int num_chunks, int max_splits) {
  using T = typename Config::Element;
  using Smem = ManyRowsSmem<Config>;
  constexpr int kDim = Config::kDim;
  constexpr int kStageEntries = Config::kStageEntries;
  // wgmma is used if a warpgroup has 64 rows. Its sums have the same bits as those of mma.sync.
  // NOTE: only for trees of 16 bits, whose own entries use mma.sync. If nothing else reads the
  // queries, ptxas 13.0 overwrites their registers with probabilities (D = 64), although the next
  // tile needs them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kWgmma = kByPosition && Config::kColumnWarps == 1 && !Config::kFp8;
#else
  constexpr bool kWgmma = false;
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);
  Trace trace;

  const int slot = args.tokens.seq_slots[static_cast<int>(blockIdx.z)];
  int pages[Config::kStages];  // pages of the first tiles
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

  // First the shared tiles, which lie below the tree. If the range reaches the tree, all tiles of
  // the tree follow, even those outside the range.
  int first_entry = range.entry_begin;  // first entry of the first tile
  int num_tiles = (range.entry_end - range.entry_begin + kStageEntries - 1) / kStageEntries;
  int num_shared = num_tiles;
  // First entry of the tree's tiles.
  const int tree_entry = kByPosition ? seq.length / kStageEntries * kStageEntries : 0;
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
  const int warp_row = warp / Config::kColumnWarps * kWarpRows;  // row within the chunk
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

  RowTile<Config::kColumns> state;  // state of the split
  state.clear();

  auto attend = [&](int tile, int entry) {
    auto& stage = stage_of(tile);
    attend_tile<Config, kWgmma>(state, stage, smem, args, seq, queries, warp_row, column, entry);
  };

  int split = range.split, split_end = split_begin(split + 1);
  SoftmaxState group_state;  // row maxima and sums of the group's earlier splits
  bool group_has_splits = false;
  // Ends the split if it has no entries from `entry` on: merges or writes its state.
  auto end_split = [&](int entry) {
    if (entry < min(split_end, range.entry_end)) return;
    if (merges) {
      const bool goes_on = (split + 1) % kSplitsPerGroup != 0 && entry < range.entry_end;
      merge_split<Config>(smem, state, group_state, group_has_splits, goes_on);
    }
    if (warp_has_rows && !group_has_splits) {
      const int place = merges ? split / kSplitsPerGroup * kSplitsPerGroup : split;
      write_split<kDim, Config::kSinks>(args, smem.packed, state, warp_row, column, place,
                                        max_splits);
    }
    split_end = split_begin(++split + 1);
    state.clear();
  };

  // Number of tiles in flight behind the current one. All stages but the last are full.
  const int num_ahead = Config::kStages - 1 - merges;
  int entry = range.entry_begin, tile = 0, next_page = pages[Config::kStages - 1];
  [[maybe_unused]] bool has_tree = false;  // the tree's tiles are in shared memory
#pragma unroll 1
  while (true) {
    if (tile < num_shared) {  // a shared tile: wait, start the next copy, multiply
      if (merges && tile > 0) {
        ptx::cp_async_wait<std::max(Config::kStages - 3, 0)>();
      } else {
        ptx::cp_async_wait<Config::kStages - 2>();
      }
      if constexpr (kWgmma) ptx::shared_copy_fence();
      __syncthreads();  // this tile has arrived; all warps are done with the previous one
      const int next = tile + num_ahead;
      if (next >= Config::kStages - 1 && next < num_tiles) {
        fetch_entries(next, entry + num_ahead * kStageEntries, next_page);
      }
      next_page = page_of(args.tokens, slot, entry + (num_ahead + 1) * kStageEntries);
      ptx::cp_async_commit();
      if (kWgmma || warp_has_rows) attend(tile, entry);
      ++tile;
      entry += kStageEntries;
    } else if (meets_tree && entry < range.entry_end) {  // a KV tile of the tree
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
