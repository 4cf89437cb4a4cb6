// What the kernels of attention_decode share: the arithmetic, and which entries and rows a block
// has.
//
// The rows * group query rows of a KV head are packed: row p stands for (row p / group, query head
// p % group). The arithmetic of a row is laid down by the absolute positions of its entries alone:
//
//   unit, 32 entries:  m = max score rounded up, l = sum 2^(s - m), acc = sum 2^(s - m) v
//   split, 4+ units: M' = max(M, m), A = A 2^(M - M') + acc 2^(m - M'), L likewise, unit by unit
//   run, 4 splits:   likewise, split by split
//   all runs:        out = sum A[r] 2^(M[r] - M) / sum L[r] 2^(M[r] - M)   (attention_combine.cu)
//
// (scores s in base 2; each begins from nothing.) A part that a row does not see leaves its state
// as it was. The references m and M are whole numbers, so all factors are exact (tiles.cuh), and a
// run may be summed before M is known or after.
//
// Scratch (Partials): acc [splits, T, Hq, D], D by dimension_at(), then (M, L) [splits, T, Hq, 2].
#pragma once

#include "core/trace.cuh"
#include "kernels/attention/combine.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("attention");

constexpr int kKvTile = 32;  // entries
constexpr int kKvTileN8 = kKvTile / 8;
constexpr int kWarpRows = 16;  // packed rows of one mma tile

// The packed rows [first, first + kRows) of one KV head of a sequence.
struct Chunk {
  Sequence seq;
  int kv_head;
  int group;  // query heads of a KV head
  int first;
  int num_packed;  // of the sequence

  template <typename T>
  __device__ __forceinline__ Chunk(const AttentionArgs<T>& args, int num_chunks, int num_rows)
      : seq(load_sequence(args.tokens, blockIdx.z)),
        kv_head(static_cast<int>(blockIdx.x) / num_chunks),
        group(args.num_heads / args.num_kv_heads),
        first(static_cast<int>(blockIdx.x) % num_chunks * num_rows),
        num_packed(seq.num_tokens * group) {}

  // The row of the sequence that packed row p of the chunk belongs to.
  __device__ __forceinline__ int token_of(int p) const { return (first + p) / group; }
};

// The splits that a block does, and their entries.
struct SplitRange {
  int split;  // the first
  int entry_begin;
  int entry_end;
};

// The page that `entry` of a sequence lies in; any if it has no such entry.
__device__ __forceinline__ int page_of(const StepTokens& tokens, int slot, int entry) {
  const int index = entry / kPageSize;
  return index < tokens.max_pages
             ? tokens.page_table[static_cast<int64_t>(slot) * tokens.max_pages + index]
             : 0;
}

// Where `entry` lies in its cache, in elements.
template <int kDim, typename T>
__device__ __forceinline__ int64_t entry_offset(const AttentionArgs<T>& args, int64_t page,
                                                int kv_head, int entry) {
  return ((page * args.num_kv_heads + kv_head) * kPageSize + entry % kPageSize) * kDim;
}

template <typename T>
__device__ __forceinline__ bool merges_split_groups(const AttentionArgs<T>& args,
                                                    const Sequence& seq) {
  return num_splits(seq.end()) >= args.merge_from;
}

// Ranges run from the last, which may have a tree, to the first.
__device__ __forceinline__ int split_range_index() { return gridDim.y - 1 - blockIdx.y; }

// Which splits this block does. Split s belongs to the range in whose share of the entries it
// begins; where runs are merged, those of a run to one range. Empty where entry_begin >= entry_end.
// look_up(entry) looks up the pages from a entry on; for split_begin(split_range_index()) it is
// done: where each split has a range of its own, the page table then need not wait for the
// sequence's length.
template <typename T, typename LookUp>
__device__ __forceinline__ SplitRange split_range_of_cta(const AttentionArgs<T>& args,
                                                         const Sequence& seq, int max_splits,
                                                         bool merges, LookUp look_up) {
  const int num_split_ranges = gridDim.y, index = split_range_index();
  SplitRange range{.split = index, .entry_begin = split_begin(index)};
  int split_end = index + 1;
  if (num_split_ranges < max_splits) {
    constexpr int kStep = split_begin(1);
    const int seen = window_begin(seq.first_entry, args.window);
    const unsigned steps = (seq.end() - seen + kStep - 1) / kStep;
    const int group_mask = merges ? kSplitsPerGroup - 1 : 0;
    auto begin_of = [&](int i) {
      if (i == 0) return (num_splits(seen + 1) - 1) & ~group_mask;
      const int offset = static_cast<int>(i * steps / num_split_ranges) * kStep;
      return (num_splits(min(seen + offset, seq.end())) + group_mask) & ~group_mask;
    };
    range.split = begin_of(index);
    range.entry_begin = split_begin(range.split);
    split_end = begin_of(index + 1);
    look_up(range.entry_begin);
  }
  range.entry_end = min(split_begin(split_end), seq.end());
  if (args.window > 0) {  // leave out pages that no row sees
    const int begin = window_begin(seq.first_entry, args.window) / kPageSize * kPageSize;
    if (range.entry_begin < begin) {
      range.entry_begin = begin;
      range.split = num_splits(begin + 1) - 1;
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
  int window_end;      // from here on every row sees all entries, up to those that masks tell of
  int tokens[kRows];   // of the sequence, that they belong to
  int ends[kRows];     // by position: so many entries they see, in the order of their positions
  int queries[kRows];  // where they begin in qkv; -1: there is no such row
  int outs[kRows];     // which rows of [T * Hq, D] they become,
  int counts[kRows];   // of how many splits; 0: none

  template <bool kByPosition, int kDim, typename T>
  __device__ __forceinline__ void load(const AttentionArgs<T>& args, const Chunk& chunk) {
    const int p = threadIdx.x;
    if (p >= kRows) return;
    const Sequence& seq = chunk.seq;
    const int row = chunk.token_of(p);
    const bool exists = chunk.first + p < chunk.num_packed;
    const int head = chunk.kv_head * chunk.group + chunk.first + p - row * chunk.group;
    queries[p] = exists ? (seq.token_begin + row) * args.qkv_row + head * args.q_head : -1;
    outs[p] = (seq.token_begin + row) * args.num_heads + head;
    const uint64_t mask = row >= seq.num_tokens ? 0
                          : args.tokens.ancestor_masks == nullptr
                              ? first_entries(row + 1)
                              : args.tokens.ancestor_masks[seq.token_begin + row];
    masks[p] = mask;
    const int end = kByPosition ? seq.length + __popcll(mask) : seq.end();
    if (kByPosition) tokens[p] = token, ends[p] = end;
    counts[p] = exists ? num_splits(end) : 0;
    if (args.window > 0) {
      const int own = kByPosition ? end - 1 : seq.first_entry + row;
      window_begins[p] = window_begin(own, args.window);
      if (p == 0) window_end = window_begin(seq.end() - 1, args.window);
    }
  }

  // Hides entries from `entry` on, as many as there are scores, from the 16 rows `row` on that do
  // not see them.
  template <int kKvTiles, typename T>
  __device__ __forceinline__ void hide(float (&scores)[kKvTiles][1][kKvTileN8][4],
                                       const AttentionArgs<T>& args, const Sequence& seq, int row,
                                       int entry) const {
    static_assert(kKvTiles * kKvTile <= 64, "a word has 64 bits");
    if (entry + kKvTiles * kKvTile <= seq.length && (args.window == 0 || entry >= window_end))
      return;
    uint64_t sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = row + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
      sees[half] = seen_entries(masks[p], seq.length, entry);
      if (args.window > 0) sees[half] &= ~first_entries(window_begins[p] - entry);
    }
#pragma unroll
    for (int tile = 0; tile < kKvTiles; ++tile) {
      const uint32_t tile_sees[2] = {static_cast<uint32_t>(sees[0] >> tile * kKvTile),
                                     static_cast<uint32_t>(sees[1] >> tile * kKvTile)};
      mask_scores(scores[tile][0], tile_sees);
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

struct SoftmaxState {
  float row_max[2];
  float sum[2];
};

// Turns the scores of a unit into probabilities.
__device__ __forceinline__ SoftmaxState softmax_of_kv_tile(float (&scores)[kKvTileN8][4],
                                                           float scale_log2) {
  SoftmaxState tile;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    tile.row_max[half] = rounded_row_max(scores, half, scale_log2);
    tile.sum[half] = quad_sum(to_probabilities(scores, half, tile.row_max[half], scale_log2));
  }
  return tile;
}

// The probabilities of a unit as operands A.
template <typename T>
__device__ __forceinline__ void pack_kv_tile(uint32_t (&a)[kKvTileN8 / 2][4],
                                             const float (&p)[kKvTileN8][4]) {
#pragma unroll
  for (int k16 = 0; k16 < kKvTileN8 / 2; ++k16) pack_fragment_a<T>(a[k16], p, k16);
}

// The probabilities of a unit times its values: use(n16, acc) takes 16 dimensions at a time.
template <typename T, int kDim, typename LoadValues, typename Use>
__device__ __forceinline__ void multiply_kv_tile_values(const float (&p)[kKvTileN8][4],
                                                        LoadValues load_values, Use use) {
  uint32_t a[kKvTileN8 / 2][4];
  pack_kv_tile<T>(a, p);
#pragma unroll
  for (int n16 = 0; n16 < kDim / 16; ++n16) {
    float acc[2][4] = {};
#pragma unroll
    for (int k16 = 0; k16 < kKvTileN8 / 2; ++k16) {
      uint32_t v[4];
      load_values(v, k16, n16);
      ptx::mma_16x8x16<T>(acc[0], a[k16], v[0], v[1]);
      ptx::mma_16x8x16<T>(acc[1], a[k16], v[2], v[3]);
    }
    use(n16, acc);
  }
}

// Adds a unit, a split, to the state of a split, a run, all but its acc: that of the whole has to
// be multiplied by `factor`, and the part's by `weight`.
template <typename State, typename Part>
__device__ __forceinline__ void weigh(State& whole, const Part& part, float (&factor)[2],
                                      float (&weight)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row_max = fmaxf(whole.row_max[half], part.row_max[half]);
    factor[half] = weight_of(whole.row_max[half], row_max);
    weight[half] = weight_of(part.row_max[half], row_max);
    whole.row_max[half] = row_max;
    whole.sum[half] =
        __fmaf_rn(part.sum[half], weight[half], __fmul_rn(whole.sum[half], factor[half]));
  }
}
// weigh(), and the split's acc multiplied.
template <int kColumns>
__device__ __forceinline__ void begin_kv_tile(RowTile<kColumns>& split, const SoftmaxState& tile,
                                              float (&weight)[2]) {
  float factor[2];
  weigh(split, tile, factor, weight);
  if (is_not_one(factor)) split.multiply(factor);
}
__device__ __forceinline__ void add_weighted(float (&to)[4], const float (&acc)[4],
                                             const float (&weight)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __fmaf_rn(acc[i], weight[i / 2], to[i]);
}

// Makes of a split's state that of its run; load_acc(n): acc[n] of the splits before.
template <int kColumns, typename LoadAcc>
__device__ __forceinline__ void add_to_split_group(RowTile<kColumns>& state,
                                                   const SoftmaxState& before, LoadAcc load_acc) {
  SoftmaxState group = before;
  float factor[2], weight[2];
  weigh(group, state, factor, weight);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.row_max[half] = group.row_max[half], state.sum[half] = group.sum[half];
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const float4 acc = load_acc(n);
    const float group_acc[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.acc[n][i] =
          __fmaf_rn(state.acc[n][i], weight[i / 2], __fmul_rn(group_acc[i], factor[i / 2]));
    }
  }
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
    if (split >= count) continue;  // it sees no entry from here on
    const int64_t t = packed.outs[p];
    if (count == 1) {
      const float inverse = inverse_of(state.sum[half]);
      T* to = args.out + t * kDim + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            pack2<T>(normalised(state.acc[n][2 * half], inverse),
                     normalised(state.acc[n][2 * half + 1], inverse));
      }
    } else {
      const Partials all(args.scratch, max_splits, args.tokens.num_tokens * args.num_heads, kDim);
      const int64_t index = split * all.num_rows + t;
      float* to = all.acc + index * kDim + column + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        *reinterpret_cast<float4*>(to + n * 8) =
            make_float4(state.acc[n][2 * half], state.acc[n][2 * half + 1],
                        state.acc[n + 1][2 * half], state.acc[n + 1][2 * half + 1]);
      }
      if (column == 0 && lane % 4 == 0) {
        all.states[index] = make_float2(state.row_max[half], state.sum[half]);
      }
    }
  }
}

}  // namespace
}  // namespace cpmcu::cuda
