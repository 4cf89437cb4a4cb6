// The recurrence of gated_delta_net.cu: 8 columns of S in the registers of a warp.
//
// A lane has rows g, g + 8, …, g + 120 of columns 2 p and 2 p + 1. Bits 0, 1 and 4 of its number
// are g, bits 2 and 3 are p. So 16 lanes read 128 contiguous bytes of a tile, without bank
// conflicts. One token takes about 190 instructions. The critical path from a token to the next has
// three shuffles:
//
//   a = S^T k, b = S^T q                            both of the S before the token
//   d = beta (v - decay a)
//   S <- decay S + k d^T
//   o = decay b + (k^T q) d                         k^T q is prepared with k and q
#pragma once

#include "core/ptx.cuh"
#include "kernels/delta_net/gated_delta_net.h"

namespace cpmcu::cuda::delta_net {

constexpr int kDim = 128;  // Dk and Dv
constexpr int kTile = kDeltaTileWidth;
constexpr int kHeadWarps = kDim / kTile;
constexpr int kLaneRows = kDim / 8;
constexpr int kTileFloats = kDim * kTile;

// q or k of a token in shared memory. Channel 32 m + 8 i + g is at 36 m + 4 g + i: a lane loads its
// channels as four float4. Neither these loads nor the stores of store_key have bank conflicts.
constexpr int kKeyFloats = 4 * 36;
constexpr int kProductAt = 32;  // place of k^T q, in a gap between the channels of q

__device__ __forceinline__ int rows_of(int lane) { return lane % 4 + lane / 16 * 4; }  // g
__device__ __forceinline__ int pair_of(int lane) { return lane / 4 % 4; }              // p

// Stores channels 4 lane .. 4 lane + 3.
__device__ __forceinline__ void store_key(float* key, const float (&x)[4], int lane) {
  float* const at = key + lane / 8 * 36 + lane % 2 * 16 + lane % 8 / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[4 * i] = x[i];
}

// A token in shared memory.
struct Prepared {
  const float* keys;     // q, then k; k^T q is in the gap behind 32 channels of q
  const float* columns;  // v of the columns that the warp has
  const float2* gates;   // decay and beta
};

// The numbers of a token that one lane reads.
struct Operands {
  float q[kLaneRows], k[kLaneRows];
  float2 v;
  float decay, beta, kq;

  static __device__ __forceinline__ void load_rows(float (&x)[kLaneRows], const float* keys,
                                                   int lane) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float4 of = *reinterpret_cast<const float4*>(keys + m * 36 + rows_of(lane) * 4);
      x[4 * m] = of.x, x[4 * m + 1] = of.y, x[4 * m + 2] = of.z, x[4 * m + 3] = of.w;
    }
  }
  __device__ __forceinline__ void load_k(const Prepared& from, int lane) {
    load_rows(k, from.keys + kKeyFloats, lane);
  }
  __device__ __forceinline__ void load_v(const float* columns, int lane) {
    v = *reinterpret_cast<const float2*>(columns + pair_of(lane) * 2);
  }
  __device__ __forceinline__ void load_others(const Prepared& from, int lane) {
    load_rows(q, from.keys, lane);
    load_v(from.columns, lane);
    const float2 of_token = *from.gates;
    decay = of_token.x, beta = of_token.y, kq = from.keys[kProductAt];
  }
};

__device__ __forceinline__ float xor_sum(float v, int distance) {
  return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, distance));
}
// The second and third addition over the 8 lanes of a pair of columns. The first is over lanes that
// differ in bit 0.
__device__ __forceinline__ float sum_rest(float v) { return xor_sum(xor_sum(v, 2), 16); }

// The terms of a token's o before the sum over lanes. In a step, that sum is computed while the
// next token waits for its own sums.
struct OutputParts {
  float kept, given;  // the lane's terms of b: of its own column, and of the other one of its pair
  float decay, d, kq;

  // o of column 2 p + lane % 2 of the tile.
  __device__ __forceinline__ float sum() const {
    const float b = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, 1));
    return __fmaf_rn(d, kq, __fmul_rn(decay, sum_rest(b)));
  }
};

struct Columns {
  float s[kLaneRows][2];

  // ---- a tile: [128, 8]

  // Place of the lane's first two numbers. Others are 64 floats apart. NOTE: if the compiler knew
  // that the lower bits of `place` are free, it would compute each address by itself.
  static __device__ __forceinline__ int first_place(int lane) {
    int place = rows_of(lane) * kTile + pair_of(lane) * 2;
    ptx::opaque(place);
    return place;
  }
  __device__ __forceinline__ void load_from(const float* tile, int lane) {
    const float* const first = tile + first_place(lane);
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(first + 8 * j * kTile);
      s[j][0] = v.x, s[j][1] = v.y;
    }
  }
  // To global memory.
  __device__ __forceinline__ void store_to(float* tile, int lane) const {
    float* const first = tile + first_place(lane);
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      ptx::store_global8(first + 8 * j * kTile, s[j][0], s[j][1]);
    }
  }
  // To shared memory.
  __device__ __forceinline__ void put_to(float* tile, int lane) const {
    float* const first = tile + first_place(lane);
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      *reinterpret_cast<float2*>(first + 8 * j * kTile) = make_float2(s[j][0], s[j][1]);
    }
  }

  // ---- a copy in shared memory, for the branches of a tree

  __device__ __forceinline__ void save(float* copy, int lane) const {
#pragma unroll
    for (int j = 0; j < kLaneRows; j += 2) {
      reinterpret_cast<float4*>(copy)[j * 16 + lane] =
          make_float4(s[j][0], s[j][1], s[j + 1][0], s[j + 1][1]);
    }
  }
  __device__ __forceinline__ void restore(const float* copy, int lane) {
#pragma unroll
    for (int j = 0; j < kLaneRows; j += 2) {
      const float4 v = reinterpret_cast<const float4*>(copy)[j * 16 + lane];
      s[j][0] = v.x, s[j][1] = v.y, s[j + 1][0] = v.z, s[j + 1][1] = v.w;
    }
  }

  // Updates S by token `x`. With kOutputs, returns o in parts.
  template <bool kOutputs>
  __device__ __forceinline__ OutputParts step(const Operands& x, int lane) {
    float a[2], d[2], halves[2][2];
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& sum = halves[c][j % 2];
        sum = j < 2 ? __fmul_rn(x.k[j], s[j][c]) : __fmaf_rn(x.k[j], s[j][c], sum);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) a[c] = xor_sum(__fadd_rn(halves[c][0], halves[c][1]), 1);
    OutputParts o{};
    const bool odd = lane % 2 != 0;
    if constexpr (kOutputs) {
      float b[2];
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          b[c] = j == 0 ? __fmul_rn(x.q[j], s[j][c]) : __fmaf_rn(x.q[j], s[j][c], b[c]);
        }
      }
      o.kept = odd ? b[1] : b[0], o.given = odd ? b[0] : b[1];
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      a[c] = sum_rest(a[c]);
      d[c] = __fmul_rn(x.beta, __fmaf_rn(-x.decay, a[c], c == 0 ? x.v.x : x.v.y));
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
        s[j][c] = __fmaf_rn(x.k[j], d[c], __fmul_rn(s[j][c], x.decay));
      }
    }
    if constexpr (kOutputs) o.decay = x.decay, o.d = odd ? d[1] : d[0], o.kq = x.kq;
    return o;
  }
};

}  // namespace cpmcu::cuda::delta_net
