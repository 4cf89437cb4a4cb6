// Attention of 1..64 rows of a sequence over the paged cache, split over the cells.
//
//   (m, l, acc)[split] = online softmax of scale * q K^T over the cells of one split, then
//   out = sum_s acc[s] 2^(m[s] - M) / sum_s l[s] 2^(m[s] - M), M = max_s m[s]   (combine kernel)
//
// Block: one (row chunk, KV head, split, sequence). The rows * group query rows of a KV head are
// packed: row p stands for (row p / group, query head p % group). One chunk is 16 packed rows, one
// mma tile, where that is enough (plain decoding); else 32. Bound, 16 rows: the cache is read once,
// at memory bandwidth; three stages of 32 KiB are in flight for each of two blocks of an SM. With
// 32 rows the chunks of one KV head run side by side (blockIdx.x), so that all but the first find
// the cells in L2, and that is the bound: 16 chunks of a tree of 32 rows over 32 query heads and 2
// KV heads read each cell 16 times. Splits of short contexts are bound by latency.
//
// Inside a split, warps share the cells: warp `slice` owns cells [16 slice, 16 slice + 16) of every
// tile of 64 (D = 256: of 32), with a softmax state of its own, and the slices are merged at the
// end as (0 + 2) + (1 + 3). So a fragment of K or V is read from shared memory by no more warps
// than there are groups of 32 packed rows.
//
// Surprising: a slice is a matter of a cell's absolute position, not of load balance, and both
// chunk sizes do the same arithmetic in the same order. A row's bits therefore depend on its own
// cells only: not on how many rows are in the step, not on max_kv. Cells and splits that a row does
// not see leave its state exactly as it was (tiles.cuh).
//
// by_position: 16 cells that end before the tree are shared by its rows as above. The rest, a few
// times 16 cells, are done for each row of the tree in turn, the others masked: the tree lies in
// shared memory, and ldmatrix takes an address from each lane, so a row's ancestors are read in the
// order of their depth as if they lay where plain decoding has them. It is the same code on the
// same numbers, so the bits are the same.
//
// Scratch: acc [splits, T, Hq, D], then (m, l) [splits, T, Hq, 2].
#include <algorithm>
#include <climits>

#include "core/dispatch.h"
#include "core/reduce.cuh"
#include "kernels/attention/tiles.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kSmall>
struct DecodeConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kCells = kDim <= 128 ? 64 : 32;            // cells of a tile
  static constexpr int kSlices = kCells / 16;                     // warps that share a tile's cells
  static constexpr int kRowTiles = kSmall || kDim > 128 ? 1 : 2;  // tiles of 16 rows in a warp
  static constexpr int kRowGroups = kSmall ? 1 : 2 / kRowTiles;   // warps that share a slice
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kRows = kRowGroups * kWarpRows;  // packed rows of a block: 16 or 32
  static constexpr int kWarps = kSlices * kRowGroups;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kDim == 64 ? 4 : 3;
  static constexpr int kTreeTiles = kMaxTreeSize / kCells + 1;  // a tree may begin anywhere in one
  static_assert(kTreeTiles <= kStages, "a tree is in shared memory as a whole");
  static_assert(kPageSize % kCells == 0, "a tile of cells lies in one page");
};

template <typename Config>
struct DecodeSmem {
  struct Stage {
    SwizzledTile<typename Config::Element, Config::kCells, Config::kDim> keys;
    SwizzledTile<typename Config::Element, Config::kCells, Config::kDim> values;
  };
  static constexpr int kFragments = Config::kRowTiles * Config::kDim / 8;
  union {
    Stage stages[Config::kStages];
    float4 exchange[Config::kWarps][kFragments][32];  // accumulators on their way to a merge
  };
  uint64_t masks[Config::kRows];  // of the packed rows
  int window_begins[Config::kRows];
  int window_end;     // from here on every row sees all cells, up to those that masks tell of
  Sequence sequence;  // for after the main loop, which leaves no register to keep it in
  float max[Config::kSlices][Config::kRows];
  float sum[Config::kSlices][Config::kRows];
};

// Where the partial results lie in scratch.
struct Partials {
  float* acc;  // [splits, T * Hq, D]
  float2* ml;  // [splits, T * Hq]: maximum and sum
  int64_t num_rows;

  __device__ Partials(float* scratch, int num_splits, int num_rows_, int head_dim)
      : acc(scratch),
        ml(reinterpret_cast<float2*>(scratch + num_splits * (int64_t{num_rows_} * head_dim))),
        num_rows(num_rows_) {}
};

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

// ---- kernels

// Grid: (chunks * KV heads, splits, B).
template <typename Config, bool kByPosition>
__global__ void __launch_bounds__(Config::kThreads)
    attention_decode_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                            int num_chunks, int max_splits) {
  using T = typename Config::Element;
  using Smem = DecodeSmem<Config>;
  constexpr int kDim = Config::kDim;
  constexpr int kCells = Config::kCells;
  constexpr int kRowTiles = Config::kRowTiles;
  constexpr int kTilesInPage = kPageSize / kCells;
  extern __shared__ __align__(128) unsigned char shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);

  ptx::pdl_wait();
  ptx::pdl_launch();
  const int lane = threadIdx.x % 32;
  const int kv_head = blockIdx.x / num_chunks;
  const StepRows& step = args.rows;
  const int slot = step.seq_slots[blockIdx.z];
  const int split = gridDim.y - 1 - blockIdx.y;  // the later, the longer: start first
  int cell_begin = split_begin(split);

  auto page_of = [&](int cell) {
    const int index = cell / kPageSize;
    return index < step.max_pages
               ? step.page_table[static_cast<int64_t>(slot) * step.max_pages + index]
               : 0;
  };
  // Lane i keeps the page of cells [64 i, 64 i + 64) of the split: no split has more than 32.
  int lane_page = page_of(cell_begin + lane * kPageSize);
  const Sequence seq = load_sequence(step, blockIdx.z);
  const int group = args.num_heads / args.num_kv_heads;
  const int num_packed = seq.num_rows * group;
  const int chunk_row = static_cast<int>(blockIdx.x % num_chunks) * Config::kRows;
  if (cell_begin >= seq.end() || chunk_row >= num_packed) return;
  const int split_end = split_begin(split + 1);
  const int cell_end = min(split_end, seq.end());
  if (args.window > 0) {  // leave out pages that no row sees
    const int begin = window_begin(seq.first_cell, args.window);
    if (cell_end <= begin) return;
    if (cell_begin < begin) {
      cell_begin = begin / kPageSize * kPageSize;
      lane_page = page_of(cell_begin + lane * kPageSize);
    }
  }
  // Tiles that all rows see alike, and then, if the split reaches that far, those that hold the
  // tree as a whole, though it may go on behind the split.
  const int tree_tile = kByPosition ? seq.length / kCells * kCells : INT_MAX;  // its first cell
  const int num_shared = max(min(cell_end, tree_tile) - cell_begin + kCells - 1, 0) / kCells;
  const bool meets_tree = kByPosition && split_end > tree_tile;
  const int num_tiles = num_shared + (meets_tree ? Config::kTreeTiles : 0);
  const int lane_tree_page = meets_tree ? page_of(tree_tile + lane % 2 * kPageSize) : 0;

  const int slice = static_cast<int>(threadIdx.x) / 32 % Config::kSlices;
  const int row_group = static_cast<int>(threadIdx.x) / 32 / Config::kSlices;
  const int warp_row = row_group * Config::kWarpRows;  // within the chunk
  const bool warp_has_rows = chunk_row + warp_row < num_packed;

  auto fetch_cells = [&](int tile) {
    auto& stage = smem.stages[tile % Config::kStages];
    const bool tree = kByPosition && tile >= num_shared;
    const int cell = tree ? tree_tile + (tile - num_shared) * kCells : cell_begin + tile * kCells;
    const int64_t page =
        tree ? __shfl_sync(0xffffffffu, lane_tree_page, cell / kPageSize - tree_tile / kPageSize)
             : __shfl_sync(0xffffffffu, lane_page, tile / kTilesInPage);
    const int64_t offset =
        ((page * args.num_kv_heads + kv_head) * kPageSize + cell % kPageSize) * kDim;
    const int num_valid = (tree ? seq.end() : cell_end) - cell;
    fetch_tile<Config::kThreads>(stage.keys, args.k_cache + offset, kDim, num_valid);
    fetch_tile<Config::kThreads>(stage.values, args.v_cache + offset, kDim, num_valid);
  };

  auto load_masks = [&]() {
    static_assert(Config::kRows <= Config::kThreads, "a thread for each mask");
    const int p = threadIdx.x;
    if (p >= Config::kRows) return;
    const int row = (chunk_row + p) / group;
    const uint64_t mask = row >= seq.num_rows         ? 0
                          : step.row_masks == nullptr ? first_cells(row + 1)
                                                      : step.row_masks[seq.row_begin + row];
    smem.masks[p] = mask;
    if (args.window > 0) {
      const int own = kByPosition ? seq.length + __popcll(mask) - 1 : seq.first_cell + row;
      smem.window_begins[p] = window_begin(own, args.window);
      if (p == 0) smem.window_end = window_begin(seq.end() - 1, args.window);
    }
    if (p == 0) smem.sequence = seq;
  };

  // Index among T * Hq of the packed row; -1 where there is none.
  auto row_of = [&](int p) -> int64_t {
    const int packed = chunk_row + p;
    if (packed >= smem.sequence.num_rows * group) return -1;
    return static_cast<int64_t>(smem.sequence.row_begin + packed / group) * args.num_heads +
           kv_head * group + packed % group;
  };

  // The packed row sees no cell from here on.
  auto row_end = [&](int p) {
    return kByPosition ? smem.sequence.length + __popcll(smem.masks[p]) : smem.sequence.end();
  };

  // Through the stage that is filled last: the queries of a block are rows of head_dim, fragments
  // are not.
  auto& query_tile = smem.stages[Config::kStages - 1].keys;
  static_assert(Config::kRows <= kCells, "the queries fit a tile");
  auto fetch_queries = [&]() {
    const int64_t stride = static_cast<int64_t>(args.num_heads + 2 * args.num_kv_heads) * kDim;
    constexpr int kChunks = kDim / 8;
    for (int at = threadIdx.x; at < Config::kRows * kChunks; at += Config::kThreads) {
      const int packed = chunk_row + at / kChunks, c = at % kChunks;
      const bool valid = packed < num_packed;
      const int row = valid ? packed / group : 0, head = kv_head * group + packed - row * group;
      const T* from = args.qkv + (seq.row_begin + row) * stride + (valid ? head * kDim : 0) + c * 8;
      ptx::cp_async16(query_tile.address(at / kChunks, c), from, valid);
    }
  };
  uint32_t queries[kRowTiles][kDim / 16][4];
  auto load_queries = [&]() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k16 = 0; k16 < kDim / 16; ++k16) {
        load_fragment_a(queries[m][k16], query_tile, warp_row + m * 16, k16);
      }
    }
  };

  RowTile<kDim> rows[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) rows[m].clear();

  auto attend = [&](int tile) {
    auto& stage = smem.stages[tile % Config::kStages];
    const int cell = (tile < num_shared ? cell_begin + tile * kCells : tree_tile) + slice * 16;
    if (!warp_has_rows || cell >= cell_end) return;
    if (kByPosition && (cell < cell_begin || cell + 16 > seq.length)) return;
    float scores[kRowTiles][2][4];
    multiply_keys<T>(scores, stage.keys, slice * 16, [&](uint32_t (&q)[kRowTiles][4], int k16) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[m][i] = queries[m][k16][i];
      }
    });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (cell + 16 > seq.length || (args.window > 0 && cell < smem.window_end)) {
        const int row = warp_row + m * 16 + lane / 4;
        uint64_t sees[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sees[half] = seen_cells(smem.masks[row + half * 8], seq.length, cell);
          if (args.window > 0) {
            sees[half] &= ~first_cells(smem.window_begins[row + half * 8] - cell);
          }
        }
        mask_scores(scores[m], sees);
      }
      softmax_step(rows[m], scores[m], args.scale_log2);
    }
    multiply_values<T>(rows, scores, stage.values, slice * 16);
  };

  // Of 16 cells from `cell` on, a row of the tree sees those before the tree and then its ancestors
  // in order; this is for row `row`, of which `m` holds some heads.
  [[maybe_unused]] auto attend_alone = [&](int m, int row, uint64_t mask, int cell) {
    const int position = cell + lane % 16, depth = position - seq.length;
    const int from = depth < 0                ? position
                     : depth < __popcll(mask) ? seq.length + nth_bit(mask, depth)
                                              : seq.length;  // any: it is masked
    const int tile = num_shared + (from - tree_tile) / kCells;
    const uint32_t lane_cell =
        smem.stages[tile % Config::kStages].keys.address((from - tree_tile) % kCells, 0);
    const uint32_t key =
        __shfl_sync(0xffffffffu, lane_cell, lane / 16 * 8 + lane % 8) ^ (lane / 8 % 2 * 16);
    const uint32_t value = (lane_cell + sizeof(typename Smem::Stage) / 2) ^ (lane / 16 * 16);

    float scores[1][2][4];
    multiply_keys<T, kDim>(
        scores,
        [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
          for (int i = 0; i < 4; ++i) q[0][i] = queries[m][k16][i];
        },
        [&](uint32_t (&k)[4], int, int k16) { ptx::ldmatrix4(k, chunk_address(key, k16 * 2)); });
    uint64_t sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp_row + m * 16 + half * 8 + lane / 4;
      sees[half] =
          (chunk_row + p) / group == row ? first_cells(seq.length + __popcll(mask) - cell) : 0;
      if (args.window > 0) sees[half] &= ~first_cells(smem.window_begins[p] - cell);
    }
    mask_scores(scores[0], sees);
    RowTile<kDim> alone[1] = {rows[m]};
    softmax_step(alone[0], scores[0], args.scale_log2);
    multiply_values<T>(alone, scores, [&](uint32_t (&v)[4], int, int n16) {
      ptx::ldmatrix4_trans(v, chunk_address(value, n16 * 2));
    });
    rows[m] = alone[0];
  };

  // The cells of the split that end behind the tree's first, one row of the tree after another.
  [[maybe_unused]] auto attend_tree = [&]() {
    const int first = max(cell_begin, seq.length / 16 * 16);
    const int skipped = (slice - first / 16 % Config::kSlices + Config::kSlices) % Config::kSlices;
    for (int cell = first + skipped * 16; cell < cell_end; cell += kCells) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int begin = chunk_row + warp_row + m * 16, end = min(begin + 16, num_packed);
        for (int packed = begin; packed < end; packed = (packed / group + 1) * group) {
          const uint64_t mask = smem.masks[packed - chunk_row];
          if (cell >= seq.length + __popcll(mask)) continue;
          attend_alone(m, packed / group, mask, cell);
        }
      }
    }
  };

  fetch_queries();
  ptx::cp_async_commit();
#pragma unroll
  for (int tile = 0; tile < Config::kStages - 1; ++tile) {
    if (tile < num_tiles) fetch_cells(tile);
    ptx::cp_async_commit();
  }
  load_masks();
  ptx::cp_async_wait<Config::kStages - 1>();
  __syncthreads();
  load_queries();
  const int num_steps = num_shared + (meets_tree ? 1 : 0);  // the tree's tiles are one step
  for (int tile = 0; tile < num_steps; ++tile) {
    ptx::cp_async_wait<Config::kStages - 2>();
    __syncthreads();  // this tile is here, and everyone is done with the one before
    const int ahead = tile + Config::kStages - 1;
    if (ahead < num_tiles) fetch_cells(ahead);
    ptx::cp_async_commit();
    attend(tile);
  }
  if (meets_tree) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    attend_tree();
  }

  // ---- merge the slices

  auto publish_max_and_sum = [&]() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      rows[m].reduce_sum();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0) {
          smem.max[slice][row] = rows[m].max[half];
          smem.sum[slice][row] = rows[m].sum[half];
        }
      }
    }
  };

  // Brings this slice's state to the maximum of all slices, and the sum to that of all.
  auto rescale = [&]() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + half * 8 + lane / 4;
        float max = smem.max[0][row];
#pragma unroll
        for (int s = 1; s < Config::kSlices; ++s) max = fmaxf(max, smem.max[s][row]);
        float sum = 0;
#pragma unroll
        for (int s = 0; s < Config::kSlices; ++s) {
          const float weight = weight_of(smem.max[s][row], max, args.scale_log2);
          sum = __fmaf_rn(smem.sum[s][row], weight, sum);
        }
        factor[half] = weight_of(rows[m].max[half], max, args.scale_log2);
        rows[m].max[half] = max;
        rows[m].sum[half] = sum;
      }
      rows[m].multiply(factor);
    }
  };

  publish_max_and_sum();
  __syncthreads();  // and everyone is done with the stages
  rescale();
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < Smem::kFragments; ++i) {
    const auto& acc = rows[i / (kDim / 8)].acc[i % (kDim / 8)];
    smem.exchange[warp][i][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
  if (!warp_has_rows) return;

  // Each slice adds up and writes its share of the fragments, all of one tile of 16 rows.
  constexpr int kShare = Smem::kFragments / Config::kSlices;
  static_assert(kDim / 8 % kShare == 0, "a share is of one tile of rows");
  const int m = slice * kShare / (kDim / 8), first_column = slice * kShare % (kDim / 8) * 8;
  T* outputs[2] = {};  // where rows go that have one split and so need no second kernel
  float* partials[2] = {};
  float inverse[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int p = warp_row + m * 16 + half * 8 + lane / 4;
    const int64_t row = row_of(p);
    if (row < 0) continue;
    const int count = num_splits(row_end(p));
    const float sum = kRowTiles == 1 || m == 0 ? rows[0].sum[half] : rows[kRowTiles - 1].sum[half];
    if (count == 1 && split == 0) {
      inverse[half] = inverse_of(sum);
      outputs[half] = args.out + row * kDim + first_column + lane % 4 * 2;
    } else if (split < count) {  // else nobody asks
      const Partials all(args.scratch, max_splits, step.num_rows * args.num_heads, kDim);
      const int64_t index = split * all.num_rows + row;
      partials[half] = all.acc + index * kDim + first_column + lane % 4 * 2;
      if (first_column == 0 && lane % 4 == 0) {
        const float max =
            kRowTiles == 1 || m == 0 ? rows[0].max[half] : rows[kRowTiles - 1].max[half];
        all.ml[index] = make_float2(max, sum);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    auto part = [&](int s) {
      return smem.exchange[row_group * Config::kSlices + s][slice * kShare + i][lane];
    };
    static_assert(Config::kSlices == 2 || Config::kSlices == 4, "0 + 1 or (0 + 2) + (1 + 3)");
    const float4 total = Config::kSlices == 2
                             ? sum_of(part(0), part(1))
                             : sum_of(sum_of(part(0), part(2)), sum_of(part(1), part(3)));
    const float values[2][2] = {{total.x, total.y}, {total.z, total.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& v = values[half];
      if (partials[half] != nullptr) {
        *reinterpret_cast<float2*>(partials[half] + i * 8) = make_float2(v[0], v[1]);
      } else if (outputs[half] != nullptr) {
        *reinterpret_cast<uint32_t*>(outputs[half] + i * 8) =
            pack2<T>(normalised(v[0], inverse[half]), normalised(v[1], inverse[half]));
      }
    }
  }
}

// Block: one row of one query head. A thread owns four dimensions and every kGroups-th run of kRun
// splits, loaded together; the groups' sums are added in order. Splits that do not exist would add
// 0, so their number does not matter.
template <typename T, int kDim>
struct CombineConfig {
  using Element = T;
  static constexpr int kColumns = kDim / 4;
  static constexpr int kThreads = 256;
  static constexpr int kGroups = kThreads / kColumns;
  static constexpr int kRun = 8;
};

template <typename T, int kDim>
__global__ void __launch_bounds__(CombineConfig<T, kDim>::kThreads)
    attention_combine_kernel(const __grid_constant__ AttentionArgs<T> args, int max_splits) {
  using Config = CombineConfig<T, kDim>;
  __shared__ float4 group_sum[Config::kGroups][Config::kColumns];

  ptx::pdl_launch();  // before the wait: the next kernel waits for this one in any case
  ptx::pdl_wait();
  const Sequence seq = args.by_position ? load_row_by_position(args.rows, blockIdx.y)
                                        : load_sequence(args.rows, args.rows.row_seqs[blockIdx.y]);
  const int count = num_splits(seq.end());
  if (count == 1) return;  // written already
  // Splits before the row's window may be missing.
  const int own = seq.first_cell + static_cast<int>(blockIdx.y) - seq.row_begin;
  const int begin = num_splits(window_begin(own, args.window) + 1) - 1;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.num_heads + blockIdx.x;
  const Partials partials(args.scratch, max_splits, args.rows.num_rows * args.num_heads, kDim);
  const float* acc = partials.acc + row * kDim;
  const float2* ml = partials.ml + row;

  auto state_of = [&](int s) {
    return s >= begin && s < count ? ml[s * partials.num_rows] : make_float2(kMinusInfinity, 0);
  };

  const int column = threadIdx.x % Config::kColumns;
  const int group = threadIdx.x / Config::kColumns;
  int first = group * Config::kRun;
  float4 part[Config::kRun];
  float part_max[Config::kRun];
  auto load_run = [&]() {
#pragma unroll
    for (int i = 0; i < Config::kRun; ++i) {
      const int64_t s = min(::max(first + i, begin), count - 1);
      const float state_max = ml[s * partials.num_rows].x;
      part_max[i] = s == first + i ? state_max : kMinusInfinity;
      part[i] = *reinterpret_cast<const float4*>(acc + s * partials.num_rows * kDim + column * 4);
    }
  };
  if (first < count) load_run();

  // Every warp for itself: maximum and sum over all splits, one split a lane.
  const int lane = threadIdx.x % 32;
  float max = kMinusInfinity;
  for (int s = lane; s < count; s += 32) max = fmaxf(max, state_of(s).x);
  max = warp_reduce(max, Max{});
  float sum = 0;
  for (int s = lane; s < count; s += 32) {
    const float2 state = state_of(s);
    sum = __fmaf_rn(state.y, weight_of(state.x, max, args.scale_log2), sum);
  }
  sum = warp_reduce(sum, Sum{});

  float4 total = make_float4(0, 0, 0, 0);
  while (first < count) {
#pragma unroll
    for (int i = 0; i < Config::kRun; ++i) {
      const float weight = weight_of(part_max[i], max, args.scale_log2);
      total.x = __fmaf_rn(part[i].x, weight, total.x);
      total.y = __fmaf_rn(part[i].y, weight, total.y);
      total.z = __fmaf_rn(part[i].z, weight, total.z);
      total.w = __fmaf_rn(part[i].w, weight, total.w);
    }
    first += Config::kGroups * Config::kRun;
    if (first < count) load_run();
  }
  group_sum[group][column] = total;
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < Config::kGroups; ++g) {
    const float4 other = group_sum[g][column];
    total.x = __fadd_rn(total.x, other.x);
    total.y = __fadd_rn(total.y, other.y);
    total.z = __fadd_rn(total.z, other.z);
    total.w = __fadd_rn(total.w, other.w);
  }
  const float inverse = inverse_of(sum);
  *reinterpret_cast<uint2*>(args.out + row * kDim + column * 4) =
      make_uint2(pack2<T>(normalised(total.x, inverse), normalised(total.y, inverse)),
                 pack2<T>(normalised(total.z, inverse), normalised(total.w, inverse)));
}

// ---- launchers

template <typename Config, bool kByPosition>
void launch_splits(const Context& ctx, const AttentionParams& params, int max_splits) {
  auto kernel = attention_decode_kernel<Config, kByPosition>;
  using Smem = DecodeSmem<Config>;
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a block");
  static_assert(sizeof(Smem::exchange) <= sizeof(Smem::stages), "the exchange fits the stages");
  static_assert(split_begin(129) - split_begin(128) <= 32 * kPageSize, "a lane for each page");
  allow_shared_bytes(kernel, sizeof(Smem));
  const StepRows& rows = params.rows;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_chunks = (rows.max_seq_rows * group + Config::kRows - 1) / Config::kRows;
  const dim3 grid(num_chunks * params.num_kv_heads, max_splits, rows.num_seqs);
  launch(ctx, kernel, grid, Config::kThreads, sizeof(Smem),
         make_args<typename Config::Element>(params), num_chunks, max_splits);
}

template <typename T, int kDim>
void launch_decode(const Context& ctx, const AttentionParams& params) {
  const StepRows& rows = params.rows;
  const int max_splits = num_splits(rows.max_kv);
  const bool small = rows.max_seq_rows * (params.num_heads / params.num_kv_heads) <= 16;
  if (params.by_position) {
    launch_splits<DecodeConfig<T, kDim, false>, true>(ctx, params, max_splits);
  } else if (small) {
    launch_splits<DecodeConfig<T, kDim, true>, false>(ctx, params, max_splits);
  } else {
    launch_splits<DecodeConfig<T, kDim, false>, false>(ctx, params, max_splits);
  }
  if (max_splits == 1) return;
  launch(ctx, attention_combine_kernel<T, kDim>, dim3(params.num_heads, rows.num_rows),
         CombineConfig<T, kDim>::kThreads, 0, make_args<T>(params), max_splits);
}

}  // namespace

// Graph-safe: yes. Reads on the device: slots, row ranges, lengths, masks, page table; with
// by_position also each row's sequence.
void attention_decode(const Context& ctx, const AttentionParams& params) {
  const StepRows& rows = params.rows;
  if (rows.num_rows == 0) return;
  check_attention(params, "attention_decode");
  CHECK(rows.max_seq_rows <= kMaxTreeSize,
        "attention_decode: a sequence may have up to {} rows, not {}", kMaxTreeSize,
        rows.max_seq_rows);
  CHECK(!params.by_position || (rows.row_masks != nullptr && rows.first_row == 0),
        "attention_decode: by_position needs masks and a step in one launch, not first_row {}",
        rows.first_row);
  const int64_t needed =
      attention_scratch_floats(rows.num_rows, params.num_heads, params.head_dim, rows.max_kv);
  CHECK(num_splits(rows.max_kv) == 1 ||
            (params.scratch.dtype() == DType::kF32 && params.scratch.num_elements() >= needed),
        "attention_decode: scratch is {} of {}, expected {} of float32",
        params.scratch.shape_text(), name_of(params.scratch.dtype()), needed);
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      launch_decode<decltype(element), dim.value>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
