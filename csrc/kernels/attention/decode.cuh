// Shared parts of the attention_decode kernels: the arithmetic, and the assignment of query rows
// and entries to CTAs.
//
// The query rows of a KV head (one for each token and query head) are packed. Packed row p is token
// p / group and query head p % group. The absolute positions of the entries that a row sees define
// the arithmetic of the row, in four levels:
//
//   KV tile      32 entries   m = max score rounded up, l = sum 2^(s - m), acc = sum 2^(s - m) v
//   split        4+ KV tiles  M' = max(M, m), A = A 2^(M - M') + acc 2^(m - M'), L likewise
//   split group  4 splits     as a split, split by split
//   row          all groups   out = sum A[g] 2^(M[g] - M) / sum L[g] 2^(M[g] - M)
//
// attention_combine.cu computes the last level. s are scores in base 2. Each level starts from the
// empty state (M = -inf, L = 0, A = 0). A part without visible entries leaves the state unchanged.
// The row maxima m and M are integers, so all rescaling is exact (tiles.cuh). Therefore a split
// group may be summed before or after M is known.
//
// Scratch (Partials): acc [splits, T, Hq, D] in the order of dimension_at(), then (M, L)
// [splits, T, Hq, 2].
#pragma once

#include "core/trace.cuh"
#include "kernels/attention/combine.cuh"
#include "kernels/attention/fp8_tiles.cuh"

namespace cpmcu::cuda {
namespace {

TRACED_FILE("attention");

constexpr int kKvTile = 32;             // entries of a KV tile
constexpr int kKvTileN8 = kKvTile / 8;  // mma columns of 8 entries
constexpr int kWarpRows = 16;           // packed rows of an m16 tile

struct Nothing {};  // in place of a part that a kernel does not have

// The packed rows [first, first + num_rows) of one KV head of a sequence.
struct Chunk {
  Sequence seq;
  int kv_head;
  int group;       // query heads that share the KV head
  int first;       // number of the chunk's first packed row
  int num_packed;  // number of packed rows of the sequence

  template <typename T>
  __device__ __forceinline__ Chunk(const AttentionArgs<T>& args, int num_chunks, int num_rows)
      : seq(load_sequence(args.tokens, blockIdx.z)),
        kv_head(static_cast<int>(blockIdx.x) / num_chunks),
        group(args.num_heads / args.num_kv_heads),
        first(static_cast<int>(blockIdx.x) % num_chunks * num_rows),
        num_packed(seq.num_tokens * group) {}

  // The token of the sequence that packed row p of the chunk belongs to.
  __device__ __forceinline__ int token_of(int p) const { return (first + p) / group; }
};

// The CTA split range: consecutive splits, and their entries.
struct SplitRange {
  int split;  // number of the first split
  int entry_begin;
  int entry_end;
};

// The page of `entry` of a sequence. An arbitrary page if the sequence has no such entry.
__device__ __forceinline__ int page_of(const StepTokens& tokens, int slot, int entry) {
  const int index = entry / kPageSize;
  return index < tokens.max_pages
             ? tokens.page_table[static_cast<int64_t>(slot) * tokens.max_pages + index]
             : 0;
}

// Offset of `entry` in the cache, in elements.
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

// The last range, which may contain a tree, has blockIdx.y = 0, so it starts first.
__device__ __forceinline__ int split_range_index() { return gridDim.y - 1 - blockIdx.y; }

// The CTA split range of this CTA. The entries are divided evenly among the ranges; a split belongs
// to the range in which it begins. If split groups are merged, a range has whole groups. The range
// is empty if entry_begin >= entry_end.
//
// look_up(entry) loads the page numbers from `entry` on. The caller has called
// look_up(split_begin(split_range_index())). If each split has its own range, that call is enough:
// the page numbers are then loaded without waiting for the sequence's length.
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
  if (args.window > 0) {  // skip pages outside all windows
    const int begin = window_begin(seq.first_entry, args.window) / kPageSize * kPageSize;
    if (range.entry_begin < begin) {
      range.entry_begin = begin;
      range.split = num_splits(begin + 1) - 1;
      look_up(begin);
    }
  }
  return range;
}

// Properties of the CTA's packed rows, in shared memory. While the queries are in flight, each
// thread computes the properties of one row.
template <int kRows>
struct PackedRows {
  uint64_t masks[kRows];  // bit i is set if the row sees entry i of the step
  int window_begins[kRows];
  int window_end;      // first entry that is inside the windows of all rows
  int tokens[kRows];   // number of the row's token within its sequence
  int ends[kRows];     // if by_position: number of entries that the row sees, without the window
  int queries[kRows];  // offset of the row's query in qkv; -1: the row does not exist
  int outs[kRows];     // row of out as [T * Hq, D]
  int counts[kRows];   // number of splits of the row; 0: the row does not exist

  template <bool kByPosition, int kDim, typename T>
  __device__ __forceinline__ void load(const AttentionArgs<T>& args, const Chunk& chunk) {
    const int p = threadIdx.x;
    if (p >= kRows) return;
    const Sequence& seq = chunk.seq;
    const int token = chunk.token_of(p);
    const bool exists = chunk.first + p < chunk.num_packed;
    const int head = chunk.kv_head * chunk.group + chunk.first + p - token * chunk.group;
    queries[p] = exists ? (seq.token_begin + token) * args.qkv_row + head * args.q_head : -1;
    outs[p] = (seq.token_begin + token) * args.num_heads + head;
    const uint64_t mask = token >= seq.num_tokens ? 0
                          : args.tokens.ancestor_masks == nullptr
                              ? first_entries(token + 1)
                              : args.tokens.ancestor_masks[seq.token_begin + token];
    masks[p] = mask;
    const int end = kByPosition ? seq.length + __popcll(mask) : seq.end();
    if (kByPosition) tokens[p] = token, ends[p] = end;
    counts[p] = exists ? num_splits(end) : 0;
    if (args.window > 0) {
      const int own = kByPosition ? end - 1 : seq.first_entry + token;
      window_begins[p] = window_begin(own, args.window);
      if (p == 0) window_end = window_begin(seq.end() - 1, args.window);
    }
  }

  // Sets the scores of entries that a row does not see to -inf, for the packed rows [row, row + 16)
  // and the entries [entry, entry + kKvTiles * kKvTile).
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

// Copies the queries of packed rows into a tile with rows of D elements.
template <int kThreads, typename T, int kRows, int kDim>
struct QueryCopy {
  static constexpr int kChunks = kDim / 8, kCopies = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0, "all threads copy the same number of chunks");
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
  // A synchronous copy. It is used if waiting for the asynchronous copies would also wait for keys
  // and values.
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

// ---- the arithmetic of 16 packed rows

struct SoftmaxState {
  float row_max[2];
  float sum[2];
};

// Replaces the scores of a KV tile by probabilities. Returns their row maxima and sums.
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

// The probabilities of a KV tile as operands A.
template <typename T>
__device__ __forceinline__ void pack_kv_tile(uint32_t (&a)[kKvTileN8 / 2][4],
                                             const float (&p)[kKvTileN8][4]) {
#pragma unroll
  for (int k16 = 0; k16 < kKvTileN8 / 2; ++k16) pack_fragment_a<T>(a[k16], p, k16);
}

// Multiplies the probabilities of a KV tile by its values. use(n16, acc) receives 16 dimensions at
// a time.
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

// Adds `part` to `whole`: a KV tile to a split, or a split to a split group. Updates the row maxima
// and sums only. The caller must add acc: whole.acc * factor + part.acc * weight.
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
// Calls weigh() and multiplies the split's acc by its factor.
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

// Adds the group's earlier splits (`before`) to a split's state, which becomes the state of the
// group. load_acc(n) loads acc[n] of the earlier splits.
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

// Writes the dimensions [column, column + kColumns) of the packed rows [row, row + 16) at the end
// of a split. If the row has one split, they are final and go to `out`. Otherwise they go to
// scratch.
template <int kDim, bool kSinks, typename T, int kRows, int kColumns>
__device__ __forceinline__ void write_split(const AttentionArgs<T>& args,
                                            const PackedRows<kRows>& packed,
                                            const RowTile<kColumns>& state, int row, int column,
                                            int split, int max_splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int p = row + half * 8 + lane / 4, count = packed.counts[p];
    if (split >= count) continue;  // the row sees no entry of this split
    const int64_t t = packed.outs[p];
    if (count == 1) {
      float sum = state.sum[half];
      if constexpr (kSinks) {
        sum = with_sink(sum, args.sinks, packed.outs[p] % args.num_heads, state.row_max[half]);
      }
      const float inverse = inverse_of(sum);
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
