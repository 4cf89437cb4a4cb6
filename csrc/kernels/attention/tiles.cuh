// Shared parts of the attention kernels: tiles in shared memory, their fragments for mma.m16n8k16,
// and the online softmax of the 16 query rows of a warp. A query row is one query head of one
// token.
//
// Softmax: probabilities are 2^(score - M), with scores in base 2. The row maximum M is rounded up
// to an integer. Therefore all rescaling factors are powers of two, and rescaling is exact. A sum
// depends only on the order of its terms, not on the row maxima during the summation. (Exception:
// terms below 2^-100 of the sum, which underflow in float32.)
//
// Fragments: a warp holds 16 query rows. A lane has two of them ("halves"), lane / 4 and
// lane / 4 + 8. Of each 8 columns it has the columns 2 * (lane % 4) and 2 * (lane % 4) + 1.
//
// Tiles: panels of 64 columns (ptx::swizzled_chunk). ldmatrix reads eight rows of a panel without
// bank conflicts. wgmma reads the panels in place.
//
// Exactness: the bits of a query row depend only on the entries that it sees. Every operation
// rounds explicitly (__fmaf_rn, __fmul_rn). An entry that the row does not see leaves the row's
// state unchanged: its probability is 0, the row maximum stays, and the rescaling factor is 1.
#pragma once

#include <climits>

#include "core/check.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/attention/attention.h"
#include "kernels/layer/rotary_kv.h"

namespace cpmcu::cuda {

constexpr float kMinusInfinity = -__builtin_huge_valf();

// ---- kernel arguments

template <typename T>
struct AttentionArgs {
  T* out;                 // [T, Hq * D]
  const T* qkv;           // [T, qkv_row]; only q is read
  const T* k_cache;       // [pages, Hkv, 64, D]
  const T* v_cache;       // [pages, Hkv, 64, D]
  float* scratch;         // partial results; attention_decode only
  const float* k_scales;  // [pages, Hkv, 64] scales of e4m3 codes; null: the caches hold T
  const float* v_scales;  // [pages, Hkv, 64] scales of the values, or null
  float scale_log2;       // scale * log2(e): softmax in base 2
  int num_heads;          // Hq
  int num_kv_heads;       // Hkv
  int qkv_row;            // elements from one row of qkv to the next
  int q_head;             // elements from one query head to the next
  int window;
  bool by_position;
  int merge_from;  // attention_decode only: the result of merges_from() in combine.cuh
  StepTokens tokens;
  // [T, Hkv, selection_words] bits of the blocks that tokens see; null: all.
  const uint64_t* selection;
  int selection_words;
  int end_position;    // attention_prefill: results of tokens from this position on are not needed
  const float* sinks;  // [Hq]; only kernels with kSinks read it
};

struct Sequence {
  int slot;
  int token_begin;  // number of the sequence's first token among the T of the step
  int num_tokens;
  // All tokens see the entries below `length`. Masks or causality decide on the others.
  int length;
  int first_entry;  // entry of the sequence's first token in this launch
  __device__ int end() const { return first_entry + num_tokens; }
};

__device__ __forceinline__ Sequence load_sequence(const StepTokens& tokens, int seq) {
  Sequence s;
  s.slot = tokens.seq_slots[seq];
  s.token_begin = tokens.seq_token_begin[seq];
  s.num_tokens = tokens.seq_token_begin[seq + 1] - s.token_begin;
  const int cached = tokens.slot_lengths[s.slot];
  s.first_entry = cached + tokens.first_token;
  s.length = tokens.ancestor_masks == nullptr ? s.first_entry : cached;
  return s;
}

// The first entry in the window of a token whose own entry is `own`.
__device__ __forceinline__ int window_begin(int own, int window) {
  return window > 0 ? max(own + 1 - window, 0) : 0;
}

// Checks the parameters that both ops have in common.
inline void check_attention(const AttentionParams& p, const char* op) {
  const StepTokens& tokens = p.tokens;
  CHECK(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
        "{}: {} query heads, expected a multiple of the {} KV heads", op, p.num_heads,
        p.num_kv_heads);
  const int q_columns = p.num_heads * p.head_dim;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  CHECK(p.out.num_dims() == 2 && p.out.size(0) >= tokens.num_tokens && p.out.size(1) == q_columns,
        "{}: out is {}, expected [{}, {}]", op, p.out.shape_text(), tokens.num_tokens, q_columns);
  CHECK(p.qkv.num_dims() == 2 && p.qkv.size(0) >= tokens.num_tokens && p.qkv.size(1) == layout.row,
        "{}: qkv is {}, expected [{}, {}]", op, p.qkv.shape_text(), tokens.num_tokens, layout.row);
  CHECK(layout.row % 8 == 0 && layout.q_head % 8 == 0,
        "{}: row stride {} and query head stride {}, expected multiples of 8", op, layout.row,
        layout.q_head);
  CHECK(p.out.dtype() == p.qkv.dtype(), "{}: out is {}, expected {} like qkv", op,
        name_of(p.out.dtype()), name_of(p.qkv.dtype()));
  check_kv_cache(op, p.k_cache, p.k_scales, p.qkv.dtype(), p.num_kv_heads, p.head_dim);
  check_kv_cache(op, p.v_cache, p.v_scales, p.qkv.dtype(), p.num_kv_heads, p.head_dim);
  CHECK(p.sinks.empty() ||
            (p.sinks.dtype() == DType::kF32 && p.selection.empty() &&
             p.sinks.num_elements() == p.num_heads && (p.head_dim == 64 || p.head_dim == 128)),
        "{}: sinks are {} {} with heads of {}, expected float32 [{}], heads of 64 or 128, and no "
        "selection",
        op, name_of(p.sinks.dtype()), p.sinks.shape_text(), p.head_dim, p.num_heads);
  CHECK(p.scale > 0, "{}: scale is {}, expected a positive number", op, p.scale);
  CHECK(p.window >= 0, "{}: window is {}, expected 0 or more", op, p.window);
  CHECK(tokens.first_token >= 0, "{}: first_token is {}, expected 0 or more", op,
        tokens.first_token);
  CHECK(tokens.ancestor_masks == nullptr ||
            tokens.first_token + tokens.max_seq_tokens <= kMaxTreeSize,
        "{}: a sequence with masks may have up to {} tokens, not {}", op, kMaxTreeSize,
        tokens.first_token + tokens.max_seq_tokens);
  CHECK_STATE(tokens.num_seqs > 0 && tokens.max_seq_tokens > 0 && tokens.max_kv > 0,
              "{}: {} sequences of up to {} tokens and {} entries, expected more than 0 of each",
              op, tokens.num_seqs, tokens.max_seq_tokens, tokens.max_kv);
}

template <typename T>
AttentionArgs<T> make_args(const AttentionParams& p) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  return {.out = p.out.as<T>(),
          .qkv = p.qkv.as<const T>(),
          .k_cache = p.k_cache.as<const T>(),
          .v_cache = p.v_cache.as<const T>(),
          .scratch = p.scratch.as<float>(),
          .k_scales = p.k_scales.as<const float>(),
          .v_scales = p.v_scales.as<const float>(),
          .scale_log2 = p.scale * kLog2E,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .qkv_row = layout.row,
          .q_head = layout.q_head,
          .window = p.window,
          .by_position = p.by_position,
          .tokens = p.tokens,
          .selection = p.selection.words.as<const uint64_t>(),
          .selection_words = p.selection.empty() ? 0 : static_cast<int>(p.selection.words.size(2)),
          .end_position = p.selection.dense_len > 0 ? p.selection.dense_len : INT_MAX,
          .sinks = p.sinks.as<const float>()};
}

// ---- tiles

template <typename T, int kRows_, int kDim_>
struct alignas(128) SwizzledTile {
  static constexpr int kRows = kRows_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowBytes = 128, kPanelBytes = kRows * kRowBytes;
  static_assert(kDim % 64 == 0, "a row must be a multiple of 64 elements");

  __device__ __forceinline__ T* chunk(int row, int c) {
    return data + ptx::swizzled_chunk<kRows, 8>(row, c);
  }
  __device__ __forceinline__ uint32_t address(int row, int c) const {
    return ptx::shared_address(data) + ptx::swizzled_chunk<kRows>(row, c);
  }
  // Given the address of chunk i of a row, i in 0..1: the address of chunk i + c, for an even c.
  static __device__ __forceinline__ uint32_t further(uint32_t address, int c) {
    return (address ^ (c % 8 * 16)) + c / 8 * kPanelBytes;
  }
  // address(row + lane_row, c + lane_chunk). row is a multiple of 8, c is even, lane_chunk is 0 or
  // 1. c changes only three bits of a lane's address within a panel. Therefore unrolled loops over
  // row and c need one register and immediates.
  __device__ __forceinline__ uint32_t address(int row, int lane_row, int c, int lane_chunk) const {
    return further(address(lane_row, lane_chunk), c) + row * kRowBytes;
  }

  T data[kRows * kDim];
};

// Starts the copy of rows [0, num_valid) from global memory. The other rows of the tile become
// zero. kThreads threads take part; `thread` is the number of this thread.
template <int kThreads, typename T, int kRows, int kDim>
__device__ __forceinline__ void fetch_tile(SwizzledTile<T, kRows, kDim>& tile, const T* source,
                                           int64_t row_stride, int num_valid, unsigned thread) {
  constexpr int kChunks = kDim / 8;
  constexpr int kStep = kThreads / kChunks;  // rows of one iteration
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0,
                "all threads copy the same number of chunks");
  const int first = static_cast<int>(thread / kChunks);
  const int c = static_cast<int>(thread % kChunks);
  source += first * row_stride + c * 8;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    // Rows at a distance of 8 have the same swizzle. Few addresses need registers; the others are
    // immediates.
    const uint32_t to = tile.address(first + row % 8, c) + row / 8 * 8 * tile.kRowBytes;
    ptx::cp_async16(to, source + row * row_stride, first + row < num_valid);
  }
}
template <int kThreads, typename T, int kRows, int kDim>
__device__ __forceinline__ void fetch_tile(SwizzledTile<T, kRows, kDim>& tile, const T* source,
                                           int64_t row_stride, int num_valid) {
  fetch_tile<kThreads>(tile, source, row_stride, num_valid, threadIdx.x);
}

// Rows [row, row + 16) and columns [16 * k16, 16 * k16 + 16) as operand A of an mma.
template <typename T, int kRows, int kDim>
__device__ __forceinline__ void load_fragment_a(uint32_t (&r)[4],
                                                SwizzledTile<T, kRows, kDim>& tile, int row,
                                                int k16) {
  const int lane = threadIdx.x % 32;
  ptx::ldmatrix4(r, tile.address(row, lane % 16, k16 * 2, lane / 16));
}

// Keys: operand B with entries [entry, entry + 16) as columns and dimensions [16 * k16, 16 * k16 +
// 16) as the summed index. r[0], r[1]: the first eight entries. r[2], r[3]: the other eight.
template <typename T, int kRows, int kDim>
__device__ __forceinline__ void load_fragment_keys(uint32_t (&r)[4],
                                                   SwizzledTile<T, kRows, kDim>& tile, int entry,
                                                   int k16) {
  const int lane = threadIdx.x % 32;
  ptx::ldmatrix4(r, tile.address(entry, lane / 16 * 8 + lane % 8, k16 * 2, lane / 8 % 2));
}

// Values: operand B with dimensions [16 * n16, 16 * n16 + 16) as columns and entries
// [entry, entry + 16) as the summed index. r[0], r[1]: the first eight dimensions. r[2], r[3]: the
// other eight.
template <typename T, int kRows, int kDim>
__device__ __forceinline__ void load_fragment_values(uint32_t (&r)[4],
                                                     SwizzledTile<T, kRows, kDim>& tile, int entry,
                                                     int n16) {
  const int lane = threadIdx.x % 32;
  ptx::ldmatrix4_trans(r, tile.address(entry, lane % 16, n16 * 2, lane / 16));
}

// ---- softmax state of 16 query rows of a warp

// Sum over the four lanes that share a query row.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

template <int kDim>
struct RowTile {
  float row_max[2];        // rounded up; -inf: no entry seen yet
  float sum[2];            // the lane's part of the sum of probabilities
  float acc[kDim / 8][4];  // sums of probability * value

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = kMinusInfinity;
      sum[half] = 0;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0;
    }
  }

  // Multiplies the dimensions [8 * first, 8 * (first + kTiles)) by `factor`.
  template <int kTiles = kDim / 8>
  __device__ __forceinline__ void multiply(const float (&factor)[2], int first = 0) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[first + n][i] = __fmul_rn(acc[first + n][i], factor[i / 2]);
      }
    }
  }

  __device__ __forceinline__ void reduce_sum() {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = quad_sum(sum[half]);
  }
};

// 2^(row_max - other), for other >= row_max: rescales a state from `row_max` to `other`.
__device__ __forceinline__ float weight_of(float row_max, float other) {
  // -inf and -inf - -inf give 0. The low bits of `exponent` are the exponent field of the result.
  const float exponent = fmaxf(row_max - other, -127.0f) + (0x1.8p23f + 127);
  return __int_as_float(__float_as_int(exponent) << 23);
}

// acc / sum, or 0 for a row that saw no entry. Adding 0 turns -0 into 0, as the sum over splits
// does.
__device__ __forceinline__ float normalised(float acc, float inverse_sum) {
  return __fmul_rn(__fadd_rn(acc, 0.0f), inverse_sum);
}
__device__ __forceinline__ float inverse_of(float sum) {
  return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum);
}

// Adds the sink's term 2^(sink - row_max) to a row's sum of probabilities 2^(s - row_max).
__device__ __forceinline__ float with_sink(float sum, const float* sinks, int head, float row_max) {
  constexpr float kLog2E = 1.4426950408889634f;
  return __fadd_rn(sum, exp2f(__fmaf_rn(sinks[head], kLog2E, -row_max)));
}

// scores = q keys^T for kTiles * 8 entries. load_q(q, k16) loads the fragments of the query rows.
// load_keys(k, n16, k16) loads those of 16 entries, in the layout of load_fragment_keys.
template <typename T, int kDim, int kRowTiles, int kTiles, typename LoadQ, typename LoadKeys>
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kTiles][4], LoadQ load_q,
                                              LoadKeys load_keys) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0;
    }
  }
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    uint32_t q[kRowTiles][4];
    load_q(q, k16);
#pragma unroll
    for (int n16 = 0; n16 < kTiles / 2; ++n16) {
      uint32_t k[4];
      load_keys(k, n16, k16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_16x8x16<T>(scores[m][2 * n16], q[m], k[0], k[1]);
        ptx::mma_16x8x16<T>(scores[m][2 * n16 + 1], q[m], k[2], k[3]);
      }
    }
  }
}

// The same sums, for entries [entry, entry + 8 * kTiles) of a tile in shared memory.
template <typename T, int kRowTiles, int kTiles, int kRows, int kDim, typename LoadQ>
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kTiles][4],
                                              SwizzledTile<T, kRows, kDim>& keys, int entry,
                                              LoadQ load_q) {
  multiply_keys<T, kDim>(scores, load_q, [&](uint32_t (&k)[4], int n16, int k16) {
    load_fragment_keys(k, keys, entry + n16 * 16, k16);
  });
}

// Sets the scores of entries that a query row does not see to -inf. Bit i of sees[half] stands for
// entry i of the kTiles * 8 entries.
template <typename Word, int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kTiles][4], const Word (&sees)[2]) {
  static_assert(kTiles <= sizeof(Word), "a word has a bit for each entry");
  const int column = threadIdx.x % 4 * 2;
  const Word mine[2] = {sees[0] >> column, sees[1] >> column};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = (mine[i / 2] >> (n * 8 + i % 2) & 1) != 0 ? scores[n][i] : kMinusInfinity;
    }
  }
}

// The maximum of a query row's scores in base 2, rounded up to an integer. `half` selects one of
// the lane's two rows.
template <int kTiles>
__device__ __forceinline__ float rounded_row_max(const float (&scores)[kTiles][4], int half,
                                                 float scale_log2) {
  float max = kMinusInfinity;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    max = fmaxf(max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
  }
  max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
  max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
  return ceilf(__fmul_rn(max, scale_log2));
}

// Replaces the scores of a query row by probabilities relative to `row_max`. Returns the sum of
// this lane's probabilities.
template <int kTiles>
__device__ __forceinline__ float to_probabilities(float (&scores)[kTiles][4], int half,
                                                  float row_max, float scale_log2) {
  const float offset = row_max == kMinusInfinity ? 0.0f : row_max;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      scores[n][i] = ptx::exp2_approx(__fmaf_rn(scores[n][i], scale_log2, -offset));
      sum = __fadd_rn(sum, scores[n][i]);
    }
  }
  return sum;
}

// True if a factor of any lane is not 1. Multiplying by 1 changes no bit and may be skipped.
__device__ __forceinline__ bool is_not_one(const float (&factor)[2]) {
  return __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
}

// Updates the row maxima, replaces the scores by probabilities, and adds these to the sums. The
// caller must multiply rows.acc by `factor`.
template <int kTiles, int kDim>
__device__ __forceinline__ void add_scores(RowTile<kDim>& rows, float (&scores)[kTiles][4],
                                           float scale_log2, float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row_max = fmaxf(rows.row_max[half], rounded_row_max(scores, half, scale_log2));
    factor[half] = weight_of(rows.row_max[half], row_max);
    rows.row_max[half] = row_max;
    const float sum = to_probabilities(scores, half, row_max, scale_log2);
    rows.sum[half] = __fmaf_rn(rows.sum[half], factor[half], sum);
  }
}
// add_scores(), and the multiplication of rows.acc.
template <int kTiles, int kDim>
__device__ __forceinline__ void softmax_step(RowTile<kDim>& rows, float (&scores)[kTiles][4],
                                             float scale_log2) {
  float factor[2];
  add_scores(rows, scores, scale_log2, factor);
  if (is_not_one(factor)) rows.multiply(factor);
}

// The probabilities of 16 entries as operand A of an mma.
template <typename T, int kTiles>
__device__ __forceinline__ void pack_fragment_a(uint32_t (&a)[4], const float (&p)[kTiles][4],
                                                int k16) {
  a[0] = pack2<T>(p[2 * k16][0], p[2 * k16][1]);
  a[1] = pack2<T>(p[2 * k16][2], p[2 * k16][3]);
  a[2] = pack2<T>(p[2 * k16 + 1][0], p[2 * k16 + 1][1]);
  a[3] = pack2<T>(p[2 * k16 + 1][2], p[2 * k16 + 1][3]);
}

// rows.acc += probabilities * values for kTiles * 8 entries. load_values(v, k16, n16) loads the
// fragments of 16 entries, in the layout of load_fragment_values.
template <typename T, int kRowTiles, int kTiles, int kDim, typename LoadValues>
__device__ __forceinline__ void multiply_values(RowTile<kDim> (&rows)[kRowTiles],
                                                const float (&p)[kRowTiles][kTiles][4],
                                                LoadValues load_values) {
#pragma unroll
  for (int k16 = 0; k16 < kTiles / 2; ++k16) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) pack_fragment_a<T>(a[m], p[m], k16);
#pragma unroll
    for (int n16 = 0; n16 < kDim / 16; ++n16) {
      uint32_t v[4];
      load_values(v, k16, n16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_16x8x16<T>(rows[m].acc[2 * n16], a[m], v[0], v[1]);
        ptx::mma_16x8x16<T>(rows[m].acc[2 * n16 + 1], a[m], v[2], v[3]);
      }
    }
  }
}

// The same sums, for entries [entry, entry + 8 * kTiles) of a tile in shared memory.
template <typename T, int kRowTiles, int kTiles, int kRows, int kDim>
__device__ __forceinline__ void multiply_values(RowTile<kDim> (&rows)[kRowTiles],
                                                const float (&p)[kRowTiles][kTiles][4],
                                                SwizzledTile<T, kRows, kDim>& values, int entry) {
  multiply_values<T>(rows, p, [&](uint32_t (&v)[4], int k16, int n16) {
    load_fragment_values(v, values, entry + k16 * 16, n16);
  });
}

// ---- visibility: words with one bit for each of the 64 entries from `entry` on

// The first `num_entries` entries.
__device__ __forceinline__ uint64_t first_entries(int num_entries) {
  if (num_entries <= 0) return 0;
  return num_entries >= 64 ? ~uint64_t{0} : (uint64_t{1} << num_entries) - 1;
}

// The entries below `length` and those that the mask names. Bit i of the mask is entry
// length + i.
__device__ __forceinline__ uint64_t seen_entries(uint64_t mask, int length, int entry) {
  const int shift = length - entry;
  if (shift >= 64) return ~uint64_t{0};
  if (shift >= 0) return first_entries(shift) | mask << shift;
  return shift > -64 ? mask >> -shift : 0;
}

}  // namespace cpmcu::cuda
