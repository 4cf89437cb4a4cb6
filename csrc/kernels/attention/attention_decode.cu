// Attention of 1..64 rows of a sequence over the paged cache, split over the cells.
//
// The rows * group query rows of a KV head are packed: row p stands for (row p / group, query head
// p % group). The arithmetic of a row is laid down by the absolute positions of its cells alone:
//
//   unit, 32 cells:  m = max score, l = sum 2^(s - m), acc = sum 2^(s - m) v, from nothing
//   split, 4+ units: M' = max(M, m), A = A 2^(M - M') + acc 2^(m - M'), L likewise, unit by unit
//   all splits:      out = sum A[s] 2^(M[s] - M) / sum L[s] 2^(M[s] - M)   (combine kernel)
//
// (scores s in base 2.) A part that a row does not see leaves its state as it was.
//
// Two kernels do that. They share work among warps in different ways and give the same bits:
//
// * few rows: a block has 16 packed rows, one mma tile, and each of its warps does one of four
//   units in turn. Their states go through shared memory, and every warp adds them up for a quarter
//   of the dimensions. Bound: the cache is read once, at memory bandwidth. Each warp copies its own
//   keys and values, the keys a round ahead, and fills their place again as soon as it may: at
//   D = 128, 96 KiB are on their way for each of two blocks of an SM before the queries come.
// * many rows: a block has 64 packed rows, each warp does 16 of them and all units, one after
//   another, with the state of the split in registers. Nothing is merged between warps. Bound: on
//   Hopper a warp's own time between two products: a tile of 64 cells takes each of two blocks of
//   an SM 2 us, of which the tensor cores need 0.6, and half the reads from L2 change nothing
//   (wgmma reads a tile from shared memory once for four warps). Before, the fragments of K and V,
//   of which every warp needs all: 16 KiB for 64 mma. Blocks of a KV head that run side by side
//   (blockIdx.x) find the cells in L2.
//
// Surprising: the grid does not have a block for each split, but about as many blocks as run at a
// time. Each does a range of splits, one after another: what comes before the first cell and behind
// the last is paid once a range, and the copies run on over the ends of splits. Where ranges begin
// changes no bit, so the host may choose.
//
// by_position: units that end before the tree are shared by its rows as above. The others, one or a
// few, are done for each row of the tree in turn, the others masked: the tree lies in shared
// memory, and ldmatrix takes an address from each lane, so a row's ancestors are read in the order
// of their depth as if they lay where plain decoding has them. It is the same code on the same
// numbers, so the bits are the same.
//
// Scratch: acc [splits, T, Hq, D], then (m, l) [splits, T, Hq, 2].
#include <algorithm>

#include "core/dispatch.h"
#include "core/trace.cuh"
#include "kernels/attention/combine.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("attention");

constexpr int kUnit = 32;  // cells
constexpr int kUnitTiles = kUnit / 8;
constexpr int kWarpRows = 16;  // packed rows of one mma tile
// Up to so many packed rows of a KV head are few.
constexpr int kMaxFewRows = 16;
// With several sequences no block does more cells of one, or the longest would be waited for.
constexpr int kMaxRangeCells = 4096;

// The packed rows [first, first + kRows) of one KV head of a sequence.
struct Chunk {
  Sequence seq;
  int kv_head;
  int group;  // query heads of a KV head
  int first;
  int num_packed;  // of the sequence

  template <typename T>
  __device__ __forceinline__ Chunk(const AttentionArgs<T>& args, int num_chunks, int num_rows)
      : seq(load_sequence(args.rows, blockIdx.z)),
        kv_head(static_cast<int>(blockIdx.x) / num_chunks),
        group(args.num_heads / args.num_kv_heads),
        first(static_cast<int>(blockIdx.x) % num_chunks * num_rows),
        num_packed(seq.num_rows * group) {}

  // The row of the sequence that packed row p of the chunk belongs to.
  __device__ __forceinline__ int row_of(int p) const { return (first + p) / group; }
};

// The splits that a block does, and their cells.
struct Range {
  int split;  // the first
  int cell_begin;
  int cell_end;
};

// The page that `cell` of a sequence lies in; any if it has no such cell.
__device__ __forceinline__ int page_of(const StepRows& rows, int slot, int cell) {
  const int index = cell / kPageSize;
  return index < rows.max_pages
             ? rows.page_table[static_cast<int64_t>(slot) * rows.max_pages + index]
             : 0;
}

// Where `cell` lies in its cache, in elements.
template <int kDim, typename T>
__device__ __forceinline__ int64_t cell_offset(const AttentionArgs<T>& args, int64_t page,
                                               int kv_head, int cell) {
  return ((page * args.num_kv_heads + kv_head) * kPageSize + cell % kPageSize) * kDim;
}

// Ranges run from the last, which may have a tree, to the first.
__device__ __forceinline__ int range_index() { return gridDim.y - 1 - blockIdx.y; }

// Which splits this block does. Split s belongs to the range in whose share of the cells it begins.
// Empty where cell_begin >= cell_end. look_up(cell) looks up the pages from a cell on; for
// split_begin(range_index()) it is done: where each split has a range of its own, the page table
// then need not wait for the sequence's length.
template <typename T, typename LookUp>
__device__ __forceinline__ Range range_of_block(const AttentionArgs<T>& args, const Sequence& seq,
                                                int max_splits, LookUp look_up) {
  const int num_ranges = gridDim.y, index = range_index();
  Range range{.split = index, .cell_begin = split_begin(index)};
  int split_end = index + 1;
  if (num_ranges < max_splits) {
    constexpr int kStep = split_begin(1);
    const int seen = window_begin(seq.first_cell, args.window);
    const unsigned steps = (seq.end() - seen + kStep - 1) / kStep;
    auto begin_of = [&](int i) {
      if (i == 0) return num_splits(seen + 1) - 1;
      const int share = static_cast<int>(i * steps / num_ranges) * kStep;
      return num_splits(min(seen + share, seq.end()));
    };
    range.split = begin_of(index);
    range.cell_begin = split_begin(range.split);
    split_end = begin_of(index + 1);
    look_up(range.cell_begin);
  }
  range.cell_end = min(split_begin(split_end), seq.end());
  if (args.window > 0) {  // leave out pages that no row sees
    const int begin = window_begin(seq.first_cell, args.window) / kPageSize * kPageSize;
    if (range.cell_begin < begin) {
      range.cell_begin = begin;
      look_up(begin);
    }
  }
  return range;
}

// What a block has to know of its packed rows, in shared memory: looked up by a thread each before
// the step's queries are there.
template <int kRows>
struct PackedRows {
  uint64_t masks[kRows];  // what they see
  int window_begins[kRows];
  int window_end;      // from here on every row sees all cells, up to those that masks tell of
  int queries[kRows];  // where they begin in qkv; -1: there is no such row
  int outs[kRows];     // which rows of [T * Hq, D] they become,
  int counts[kRows];   // of how many splits; 0: none

  template <bool kByPosition, int kDim, typename T>
  __device__ __forceinline__ void load(const AttentionArgs<T>& args, const Chunk& chunk) {
    const int p = threadIdx.x;
    if (p >= kRows) return;
    const Sequence& seq = chunk.seq;
    const int row = chunk.row_of(p);
    const bool exists = chunk.first + p < chunk.num_packed;
    const int head = chunk.kv_head * chunk.group + chunk.first + p - row * chunk.group;
    const int num_columns = (args.num_heads + 2 * args.num_kv_heads) * kDim;
    queries[p] = exists ? (seq.row_begin + row) * num_columns + head * kDim : -1;
    outs[p] = (seq.row_begin + row) * args.num_heads + head;
    const uint64_t mask = row >= seq.num_rows ? 0
                          : args.rows.row_masks == nullptr
                              ? first_cells(row + 1)
                              : args.rows.row_masks[seq.row_begin + row];
    masks[p] = mask;
    const int end = kByPosition ? seq.length + __popcll(mask) : seq.end();
    counts[p] = exists ? num_splits(end) : 0;
    if (args.window > 0) {
      const int own = kByPosition ? seq.length + __popcll(mask) - 1 : seq.first_cell + row;
      window_begins[p] = window_begin(own, args.window);
      if (p == 0) window_end = window_begin(seq.end() - 1, args.window);
    }
  }

  // Hides cells from `cell` on, as many as there are scores, from the 16 rows `row` on that do not
  // see them.
  template <int kUnits, typename T>
  __device__ __forceinline__ void hide(float (&scores)[kUnits][1][kUnitTiles][4],
                                       const AttentionArgs<T>& args, const Sequence& seq, int row,
                                       int cell) const {
    static_assert(kUnits * kUnit <= 64, "a word has 64 bits");
    if (cell + kUnits * kUnit <= seq.length && (args.window == 0 || cell >= window_end)) return;
    uint64_t sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = row + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      sees[half] = seen_cells(masks[p], seq.length, cell);
      if (args.window > 0) sees[half] &= ~first_cells(window_begins[p] - cell);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint64_t of_unit[2] = {sees[0] >> unit * kUnit, sees[1] >> unit * kUnit};
      mask_scores(scores[unit][0], of_unit);
    }
  }
};

// Copies the queries of packed rows, as rows of D.
template <int kThreads, typename T, int kRows, int kDim>
struct QueryCopy {
  static constexpr int kChunks = kDim / 8, kCopies = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0, "every thread copies as many chunks");
  int from[kCopies];

  __device__ __forceinline__ void look_up(const PackedRows<kRows>& packed) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      from[i] = packed.queries[(static_cast<int>(threadIdx.x) + i * kThreads) / kChunks];
    }
  }
  __device__ __forceinline__ void start(SwizzledTile<T, kRows, kDim>& tile, const T* qkv) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads, c = at % kChunks;
      ptx::cp_async16(tile.address(at / kChunks, c), qkv + max(from[i], 0) + c * 8, from[i] >= 0);
    }
  }
  // Now, for who may not wait for the copies that run already.
  __device__ __forceinline__ void copy(SwizzledTile<T, kRows, kDim>& tile, const T* qkv) const {
    Vec<T, 8> chunks[kCopies] = {};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (from[i] >= 0) chunks[i] = load<T, 8>(qkv + from[i] + at % kChunks * 8);
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      store(tile.chunk(at / kChunks, at % kChunks), chunks[i]);
    }
  }
};

// ---- the arithmetic, of 16 packed rows

struct UnitState {
  float max[2];
  float sum[2];
};

// Turns the scores of a unit into probabilities.
__device__ __forceinline__ UnitState softmax_of_unit(float (&scores)[kUnitTiles][4],
                                                     float scale_log2) {
  UnitState unit;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unit.max[half] = max_of_row(scores, half, kMinusInfinity);
    unit.sum[half] = quad_sum(to_probabilities(scores, half, unit.max[half], scale_log2));
  }
  return unit;
}

// The probabilities of a unit as operands A.
template <typename T>
__device__ __forceinline__ void pack_unit(uint32_t (&a)[kUnitTiles / 2][4],
                                          const float (&p)[kUnitTiles][4]) {
#pragma unroll
  for (int k16 = 0; k16 < kUnitTiles / 2; ++k16) pack_fragment_a<T>(a[k16], p, k16);
}

// The probabilities of a unit times its values: use(n16, acc) takes 16 dimensions at a time.
template <typename T, int kDim, typename LoadValues, typename Use>
__device__ __forceinline__ void multiply_unit_values(const float (&p)[kUnitTiles][4],
                                                     LoadValues load_values, Use use) {
  uint32_t a[kUnitTiles / 2][4];
  pack_unit<T>(a, p);
#pragma unroll
  for (int n16 = 0; n16 < kDim / 16; ++n16) {
    float acc[2][4] = {};
#pragma unroll
    for (int k16 = 0; k16 < kUnitTiles / 2; ++k16) {
      uint32_t v[4];
      load_values(v, k16, n16);
      ptx::mma_16x8x16<T>(acc[0], a[k16], v[0], v[1]);
      ptx::mma_16x8x16<T>(acc[1], a[k16], v[2], v[3]);
    }
    use(n16, acc);
  }
}

// Adds a unit to the state of a split, all but its acc: that of the split has to be multiplied by
// `factor`, and the unit's by `weight`.
template <int kColumns>
__device__ __forceinline__ void weigh_unit(RowTile<kColumns>& split, const UnitState& unit,
                                           float scale_log2, float (&factor)[2],
                                           float (&weight)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float max = fmaxf(split.max[half], unit.max[half]);
    factor[half] = weight_of(split.max[half], max, scale_log2);
    weight[half] = weight_of(unit.max[half], max, scale_log2);
    split.max[half] = max;
    split.sum[half] =
        __fmaf_rn(unit.sum[half], weight[half], __fmul_rn(split.sum[half], factor[half]));
  }
}
// Whether any lane has to multiply by it: by 1 changes no bit, so skipping that does not either.
__device__ __forceinline__ bool is_not_one(const float (&factor)[2]) {
  return __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
}
// weigh_unit, and the split's acc multiplied.
template <int kColumns>
__device__ __forceinline__ void begin_unit(RowTile<kColumns>& split, const UnitState& unit,
                                           float scale_log2, float (&weight)[2]) {
  float factor[2];
  weigh_unit(split, unit, scale_log2, factor, weight);
  if (is_not_one(factor)) split.multiply(factor);
}
__device__ __forceinline__ void add_weighted(float (&to)[4], const float (&acc)[4],
                                             const float (&weight)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __fmaf_rn(acc[i], weight[i / 2], to[i]);
}

// Writes dimensions [column, column + kColumns) of the 16 rows `row` on at the end of a split: to
// `out` where the row has no other split, and so needs no second kernel.
template <int kDim, typename T, int kRows, int kColumns>
__device__ __forceinline__ void write_split(const AttentionArgs<T>& args,
                                            const PackedRows<kRows>& packed,
                                            const RowTile<kColumns>& state, int row, int column,
                                            int split, int max_splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int p = row + half * 8 + lane / 4, count = packed.counts[p];
    if (split >= count) continue;  // it sees no cell from here on
    const int64_t t = packed.outs[p];
    const int first = column + lane % 4 * 2;
    if (count == 1) {
      const float inverse = inverse_of(state.sum[half]);
      T* to = args.out + t * kDim + first;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            pack2<T>(normalised(state.acc[n][2 * half], inverse),
                     normalised(state.acc[n][2 * half + 1], inverse));
      }
    } else {
      const Partials all(args.scratch, max_splits, args.rows.num_rows * args.num_heads, kDim);
      const int64_t index = split * all.num_rows + t;
      float* to = all.acc + index * kDim + first;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) =
            make_float2(state.acc[n][2 * half], state.acc[n][2 * half + 1]);
      }
      if (column == 0 && lane % 4 == 0) {
        all.ml[index] = make_float2(state.max[half], state.sum[half]);
      }
    }
  }
}

// ---- few rows: the warps of a block share the cells

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
    Cells cells;
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
  float2 max_and_sum[Config::kWarps][Config::kRows];  // of the units of a round
  PackedRows<Config::kRows> packed;
};

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
  const bool launches_early = args.rows.num_rows == 1;
  if (launches_early) ptx::pdl_launch();
  const int warp = ptx::uniform_warp();
  const int lane = threadIdx.x % 32;
  const int slot = args.rows.seq_slots[static_cast<int>(blockIdx.z)];
  int round_cell, page, next_page;  // of this warp's unit in a round, and in the next
  const auto page_of_unit = [&](int cell) { return page_of(args.rows, slot, cell + warp * kUnit); };
  auto look_up = [&](int cell) {
    round_cell = cell / Config::kRoundCells * Config::kRoundCells;
    page = page_of_unit(round_cell);
    next_page = page_of_unit(round_cell + Config::kRoundCells);
  };
  look_up(split_begin(range_index()));
  const Chunk chunk(args, num_chunks, Config::kRows);
  const Sequence& seq = chunk.seq;
  const Range range = range_of_block(args, seq, max_splits, look_up);
  if (range.cell_begin >= range.cell_end || chunk.first >= chunk.num_packed) {
    ptx::pdl_wait();
    return;
  }

  auto& unit = smem.units[warp];
  auto exists = [&](int cell) { return cell >= range.cell_begin && cell < range.cell_end; };
  // Starts to copy the unit from `cell` on, in a group of its own, which is empty if there is none.
  auto fetch = [&](auto& tile, const T* cache, int cell, int page) {
    if (exists(cell)) {
      const int64_t offset = cell_offset<kDim>(args, page, chunk.kv_head, cell);
      fetch_tile<32>(tile, cache + offset, kDim, seq.end() - cell, lane);
    }
    ptx::cp_async_commit();
  };

  // Cells of earlier steps need not wait for this one's (core/launch.h). The queries come to where
  // the last warp's second keys will be.
  const int first = round_cell + warp * kUnit, second = first + Config::kRoundCells;
  const bool is_old = (exists(second) ? second : first) + kUnit <= seq.first_cell;
  // Where all multiprocessors are full: the loads of a combination that is still running, whose end
  // the queries wait for, should not stand in a queue behind all that blocks have room for.
  const bool one_by_one = gridDim.x * gridDim.y * gridDim.z > ptx::num_multiprocessors();
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
    if (now) fetch(unit.keys[0].cells, args.k_cache, first, page);
    if (pass == 0) {
      smem.packed.template load<false, kDim>(args, chunk);
      __syncthreads();
      queries_copy.look_up(smem.packed);
    }
    if (now) {
      if (one_by_one) ptx::cp_async_wait<0>();
      fetch(unit.values, args.v_cache, first, page);
      if (one_by_one) ptx::cp_async_wait<0>();
      if (!lends_tile) fetch(unit.keys[1].cells, args.k_cache, second, next_page);
    }
  }
  queries_copy.copy(queries_tile, args.qkv);
  __syncthreads();
  trace.stamp(2);
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragment_a(queries[k16], queries_tile, 0, k16);
  __syncthreads();
  if (lends_tile) fetch(unit.keys[1].cells, args.k_cache, second, next_page);

  RowTile<Config::kColumns> state;  // of the split: all rows, this warp's dimensions
  state.clear();
  int split = range.split, split_end = split_begin(split + 1);
#pragma unroll 1
  for (int i = 0; round_cell < range.cell_end; round_cell += Config::kRoundCells, i ^= 1) {
    // On their way: keys, values, and the keys of the next round.
    const int cell = round_cell + warp * kUnit;
    page = next_page;
    next_page = page_of_unit(round_cell + 2 * Config::kRoundCells);
    ptx::cp_async_wait<2>();
    __syncwarp();
    UnitState sums;
    float scores[1][1][kUnitTiles][4];
    if (exists(cell)) {
      multiply_keys<T>(scores[0], unit.keys[i].cells, 0, [&](uint32_t (&q)[1][4], int k16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) q[0][j] = queries[k16][j];
      });
      smem.packed.hide(scores, args, seq, 0, cell);
      sums = softmax_of_unit(scores[0][0], args.scale_log2);
    }
    ptx::cp_async_wait<1>();
    __syncwarp();
    if (exists(cell)) {
      multiply_unit_values<T, kDim>(
          scores[0][0],
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
          smem.max_and_sum[warp][half * 8 + lane / 4] = make_float2(sums.max[half], sums.sum[half]);
        }
      }
    }
    __syncwarp();
    fetch(unit.values, args.v_cache, cell + Config::kRoundCells, page);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < Config::kWarps; ++u) {
      if (!exists(round_cell + u * kUnit)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 v = smem.max_and_sum[u][half * 8 + lane / 4];
        sums.max[half] = v.x, sums.sum[half] = v.y;
      }
      float weight[2];
      begin_unit(state, sums, args.scale_log2, weight);
#pragma unroll
      for (int n = 0; n < Config::kColumns / 8; ++n) {
        const float4 part = smem.units[u].keys[i].acc[warp * (Config::kColumns / 8) + n][lane];
        add_weighted(state.acc[n], {part.x, part.y, part.z, part.w}, weight);
      }
    }
    __syncthreads();
    fetch(unit.keys[i].cells, args.k_cache, cell + 2 * Config::kRoundCells, next_page);
    if (round_cell + Config::kRoundCells >= min(split_end, range.cell_end)) {
      write_split<kDim>(args, smem.packed, state, 0, warp * Config::kColumns, split, max_splits);
      split_end = split_begin(++split + 1);
      state.clear();
    }
  }
  trace.stamp(3);
  trace.end();
}

// ---- many rows: the warps of a block share the rows

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
  static_assert(kTreeTiles <= kStages, "a tree is in shared memory as a whole");
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
  Chunk chunk;  // for the tree and the ends of splits

  // In the stage that is filled last.
  __device__ __forceinline__ Queries& queries() {
    return reinterpret_cast<Queries&>(stages[Config::kStages - 1]);
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
  const auto descriptor = [](const Cells& tile) {
    // The same in all lanes, and the compiler has to be told.
    return ptx::wgmma_descriptor_swizzle128(__shfl_sync(0xffffffffu, tile.address(0, 0), 0));
  };
  const uint64_t key_rows = descriptor(keys), value_rows = descriptor(values);
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
    if (panel == 0) weigh_unit(state, sums[unit], scale_log2, factor, weight);
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
  const Range range = range_of_block(args, seq, max_splits, look_up);
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

  auto fetch_cells = [&](int tile, int cell, int page) {
    auto& stage = smem.stages[tile % Config::kStages];
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
    begin_unit(state, unit, args.scale_log2, weight);
    multiply_unit_values<T, Config::kColumns>(
        scores[0],
        [&](uint32_t (&v)[4], int k16, int n16) { load_values(v, k16, column / 16 + n16); },
        [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
          for (int n = 0; n < 2; ++n) add_weighted(state.acc[2 * n16 + n], acc[n], weight);
        });
  };

  auto attend = [&](int tile, int cell) {
    auto& stage = smem.stages[tile % Config::kStages];
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

  // Adds the unit from `cell` on for row `row` of the tree, which sees the cells before the tree
  // and then its ancestors in order, or for all rows if it ends before the tree. From the tree's
  // tiles.
  [[maybe_unused]] auto attend_alone = [&](int cell, int row, uint64_t mask) {
    const Sequence& seq = smem.chunk.seq;  // the main loop leaves no registers for it
    const int tree_cell = seq.length / kCells * kCells;
    const bool all = cell + kUnit <= seq.length;
    const int position = cell + lane, depth = position - seq.length;
    const int from = depth < 0                ? position
                     : depth < __popcll(mask) ? seq.length + nth_bit(mask, depth)
                                              : seq.length;  // any: it is masked
    const int tile = num_shared + (from - tree_cell) / kCells;
    const uint32_t lane_cell =
        smem.stages[tile % Config::kStages].keys.address((from - tree_cell) % kCells, 0);
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
    uint64_t sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = warp_row + half * 8 + lane / 4;
      sees[half] = all || smem.chunk.row_of(p) == row
                       ? first_cells(seq.length + __popcll(smem.packed.masks[p]) - cell)
                       : 0;
      if (args.window > 0) sees[half] &= ~first_cells(smem.packed.window_begins[p] - cell);
    }
    mask_scores(scores[0], sees);
    add_unit(scores, [&](uint32_t (&v)[4], int k16, int n16) {
      ptx::ldmatrix4_trans(v, Cells::further(value[k16], n16 * 2));
    });
  };

  // The unit from `cell` on, in the tree's tiles, for all rows of the warp.
  [[maybe_unused]] auto attend_tree = [&](int cell) {
    const Chunk& chunk = smem.chunk;
    const int length = chunk.seq.length;
    const int begin = chunk.first + warp_row, end = min(begin + kWarpRows, chunk.num_packed);
    for (int p = begin; p < end; p = (p / chunk.group + 1) * chunk.group) {
      const uint64_t mask = smem.packed.masks[p - chunk.first];
      if (cell >= length + __popcll(mask)) continue;
      attend_alone(cell, p / chunk.group, mask);
      if (cell + kUnit <= length) return;
    }
  };

  int split = range.split, split_end = split_begin(split + 1);
  // If it has no cells from `cell` on.
  auto end_split = [&](int cell) {
    if (cell < min(split_end, range.cell_end)) return;
    if (warp_has_rows) {
      write_split<kDim>(args, smem.packed, state, warp_row, column, split, max_splits);
    }
    split_end = split_begin(++split + 1);
    state.clear();
  };

  int cell = range.cell_begin, next_page = pages[Config::kStages - 1], tile = 0;
  [[maybe_unused]] bool has_tree = false;  // in shared memory
#pragma unroll 1
  while (true) {
    if (tile < num_shared) {
      ptx::cp_async_wait<Config::kStages - 2>();
      if constexpr (kWgmma) ptx::shared_copy_fence();
      __syncthreads();  // this tile is here, and everyone is done with the one before
      constexpr int kAhead = Config::kStages - 1;
      if (tile + kAhead < num_tiles) fetch_cells(tile + kAhead, cell + kAhead * kCells, next_page);
      next_page = page_of(args.rows, slot, cell + (kAhead + 1) * kCells);
      ptx::cp_async_commit();
      if (kWgmma || warp_has_rows) attend(tile, cell);
      ++tile;
      cell += kCells;
    } else if (meets_tree && cell < range.cell_end) {
      if (!has_tree) {
        if constexpr (Config::kTreeTiles == Config::kStages) {  // its last tile waits for a stage
          __syncthreads();
          const int tree_cell = smem.chunk.seq.length / kCells * kCells;
          fetch_cells(num_shared + Config::kStages - 1, tree_cell + (Config::kStages - 1) * kCells,
                      next_page);
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

// ---- combine

// A run of splits, and four of the dimensions of a row of a head.
struct SplitRun {
  static constexpr int kSplits = kSplitsOfRun;
  float part[kSplits][4];

  // acc: of the row of the head. Splits that do not exist will add 0.
  __device__ __forceinline__ void load(const float* acc, int64_t acc_stride, int run,
                                       const RowSplits& splits) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const int64_t s = ::min(::max(run * kSplits + i, splits.begin), splits.count - 1);
      *reinterpret_cast<float4*>(part[i]) = *reinterpret_cast<const float4*>(acc + s * acc_stride);
    }
  }
  // sum += part times weight, split by split; `states` are its splits'.
  __device__ __forceinline__ void add_to(float (&sum)[4], const float2* states, float max_of_row,
                                         float scale_log2) const {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const float weight = weight_of(states[i].x, max_of_row, scale_log2);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = __fmaf_rn(part[i][j], weight, sum[j]);
    }
  }
};

// Block: one row of one query head, and of its dimensions 1 / kParts. A thread owns four dimensions
// and every kGroups-th SplitRun; the runs' sums are added in order. Splits that do not exist would
// add 0, so their number does not matter, nor does kParts.
template <typename T, int kDim_, int kParts_, int kThreads_>
struct CombineConfig {
  using Element = T;
  static constexpr int kDim = kDim_;
  static constexpr int kParts = kParts_;  // more where rows are too few to fill the chip
  static constexpr int kColumns = kDim / 4 / kParts;
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kThreads / kColumns;
  static constexpr int kRuns = 32;  // of which the sums find room
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    attention_combine_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args,
                             int max_splits) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim;
  using Run = SplitRun;
  __shared__ float4 run_sums[Config::kRuns][Config::kColumns];
  extern __shared__ float2 states[];  // maximum and sum of all splits of the row

  ptx::pdl_launch();  // before the wait: the next kernel waits for this one in any case
  const RowSplits splits(args, blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) / Config::kParts;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * args.num_heads + head;
  const int thread_column = static_cast<int>(threadIdx.x) % Config::kColumns;
  const int column =
      (static_cast<int>(blockIdx.x) % Config::kParts * Config::kColumns + thread_column) * 4;
  const Partials partials(args.scratch, max_splits, args.rows.num_rows * args.num_heads, kDim);
  const float* acc = partials.acc + row * kDim + column;
  const float2* ml = partials.ml + row;
  ptx::pdl_wait();
  if (splits.count == 1) return;  // written already

  const int num_runs = (splits.count + Run::kSplits - 1) / Run::kSplits;
  int run = static_cast<int>(threadIdx.x) / Config::kColumns;
  const bool adds_runs = run == 0;
  Run parts;
  auto load_run = [&]() {
    if (run >= num_runs) return;
    parts.load(acc, partials.num_rows * kDim, run, splits);
  };
  load_run();
  // By all warps, while that is on its way: each split's once.
  for (int s = static_cast<int>(threadIdx.x); s < num_runs * Run::kSplits; s += Config::kThreads) {
    states[s] = splits.has(s) ? ml[s * partials.num_rows] : make_float2(kMinusInfinity, 0);
  }
  __syncthreads();
  const auto [max, sum] = max_and_sum<4>(states, 1, splits, args.scale_log2);

  float total[4] = {};
  for (int first_run = 0; first_run < num_runs; first_run += Config::kRuns) {
    const int end_run = min(first_run + Config::kRuns, num_runs);
    for (; run < end_run; run += Config::kGroups, load_run()) {
      float run_sum[4] = {};
      parts.add_to(run_sum, states + run * Run::kSplits, max, args.scale_log2);
      run_sums[run - first_run][thread_column] = {run_sum[0], run_sum[1], run_sum[2], run_sum[3]};
    }
    __syncthreads();
    for (int i = 0; i < end_run - first_run && adds_runs; ++i) {
      const float4 run_sum = run_sums[i][thread_column];
      total[0] = __fadd_rn(total[0], run_sum.x);
      total[1] = __fadd_rn(total[1], run_sum.y);
      total[2] = __fadd_rn(total[2], run_sum.z);
      total[3] = __fadd_rn(total[3], run_sum.w);
    }
    __syncthreads();
  }
  if (!adds_runs) return;
  const float inverse = inverse_of(sum);
  *reinterpret_cast<uint2*>(args.out + row * kDim + column) =
      make_uint2(pack2<T>(normalised(total[0], inverse), normalised(total[1], inverse)),
                 pack2<T>(normalised(total[2], inverse), normalised(total[3], inverse)));
}

// ---- launchers

// So many ranges that about as many blocks come of it as run at a time.
template <typename Config, typename Smem, typename Kernel>
void launch_splits(const Context& ctx, const AttentionParams& params, int max_splits,
                   Kernel kernel) {
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a block");
  allow_shared_bytes(kernel, sizeof(Smem));
  const StepRows& rows = params.rows;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_chunks = (rows.max_seq_rows * group + Config::kRows - 1) / Config::kRows;
  const int per_range = num_chunks * params.num_kv_heads * rows.num_seqs;
  int num_ranges = Config::kBlocks * ctx.sm_count / per_range;
  if (rows.num_seqs > 1) num_ranges = std::max(num_ranges, rows.max_kv / kMaxRangeCells);
  num_ranges = std::clamp(num_ranges, 1, max_splits);
  const dim3 grid(num_chunks * params.num_kv_heads, num_ranges, rows.num_seqs);
  launch(ctx, kernel, grid, Config::kThreads, sizeof(Smem),
         make_args<typename Config::Element>(params), num_chunks, max_splits);
}

template <typename T, int kDim>
void launch_all_splits(const Context& ctx, const AttentionParams& params) {
  using Few = FewRowsConfig<T, kDim>;
  using Many = ManyRowsConfig<T, kDim>;
  const StepRows& rows = params.rows;
  const int max_splits = num_splits(rows.max_kv);
  const int max_packed = rows.max_seq_rows * (params.num_heads / params.num_kv_heads);
  if (params.by_position) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, max_splits,
                                            attention_many_rows_kernel<Many, true>);
  } else if (max_packed > kMaxFewRows) {
    launch_splits<Many, ManyRowsSmem<Many>>(ctx, params, max_splits,
                                            attention_many_rows_kernel<Many, false>);
  } else {
    launch_splits<Few, FewRowsSmem<Few>>(ctx, params, max_splits, attention_few_rows_kernel<Few>);
  }
}

template <typename T, int kDim>
void launch_combine(const Context& ctx, const AttentionParams& params) {
  const int num_rows = params.rows.num_rows, max_splits = num_splits(params.rows.max_kv);
  const auto combine = [&](auto config) {
    using Config = decltype(config);
    const auto kernel = attention_combine_kernel<Config>;
    const int runs = (max_splits + kSplitsOfRun - 1) / kSplitsOfRun;
    const size_t bytes = runs * kSplitsOfRun * sizeof(float2);
    allow_shared_bytes(kernel, bytes + Config::kRuns * Config::kColumns * sizeof(float4));
    launch(ctx, kernel, dim3(params.num_heads * Config::kParts, num_rows), Config::kThreads, bytes,
           make_args<T>(params), max_splits);
  };
  // Few rows have all runs of splits loaded at once.
  using Few = CombineConfig<T, kDim, 4, 128>;
  if (params.num_heads * num_rows >= ctx.sm_count) {
    combine(CombineConfig<T, kDim, 1, 128>{});
  } else if (max_splits <= Few::kGroups * kSplitsOfRun) {
    combine(Few{});
  } else {
    combine(CombineConfig<T, kDim, 4, 256>{});
  }
}

}  // namespace

// Graph-safe: yes. Reads on the device: slots, row ranges, lengths, masks, page table.
void attention_splits(const Context& ctx, const AttentionParams& params) {
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
      launch_all_splits<decltype(element), dim.value>(ctx, params);
    });
  });
}

// Graph-safe: yes. Reads on the device: positions, if by_position or of one row; else each row's
// sequence, slots, row ranges and lengths.
void attention_combine(const Context& ctx, const AttentionParams& params) {
  if (params.rows.num_rows == 0 || num_splits(params.rows.max_kv) == 1) return;
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_combine: head_dim", params.head_dim, [&](auto dim) {
      launch_combine<decltype(element), dim.value>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
