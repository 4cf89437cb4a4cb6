// The recurrence of gated_delta_net.cu: 8 columns of S in the registers of a warp.
//
// Lane l has rows g, g + 8, …, g + 120 of columns 2 p and 2 p + 1, where g = l % 8 and p = l / 8.
// One token takes about 165 instructions. Three shuffles are in the chain from a token to the next:
//
//   a = S^T k, b = S^T q                            both of the S before the token
//   d = beta (v - decay a)
//   S <- decay S + k d^T
//   o = decay b + (k^T q) d                         k^T q is prepared with k and q
#pragma once

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

// Stores channels 4 lane .. 4 lane + 3.
__device__ __forceinline__ void store_key(float* key, const float (&x)[4], int lane) {
  float* const at = key + lane / 8 * 36 + lane % 2 * 16 + lane % 8 / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[4 * i] = x[i];
}

// The numbers of a token that one lane reads.
struct Operands {
  float q[kLaneRows], k[kLaneRows];
  float2 v;
  float decay, beta, kq;

  // `keys`: q and then k. `columns`: v of the warp's columns. `gates`: decay, beta, k^T q.
  __device__ __forceinline__ void load(const float* keys, const float* columns, const float4* gates,
                                       int lane) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int at = m * 36 + lane % 8 * 4;
      const float4 of_k = *reinterpret_cast<const float4*>(keys + kKeyFloats + at);
      const float4 of_q = *reinterpret_cast<const float4*>(keys + at);
      k[4 * m] = of_k.x, k[4 * m + 1] = of_k.y, k[4 * m + 2] = of_k.z, k[4 * m + 3] = of_k.w;
      q[4 * m] = of_q.x, q[4 * m + 1] = of_q.y, q[4 * m + 2] = of_q.z, q[4 * m + 3] = of_q.w;
    }
    v = *reinterpret_cast<const float2*>(columns + lane / 8 * 2);
    const float4 of_token = *gates;
    decay = of_token.x, beta = of_token.y, kq = of_token.z;
  }
};

struct Columns {
  float s[kLaneRows][2];

  // ---- a tile in global memory: [128, 8]

  __device__ __forceinline__ void load_from(const float* tile, int lane) {
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(tile + tile_offset(j, lane));
      s[j][0] = v.x, s[j][1] = v.y;
    }
  }
  __device__ __forceinline__ void store_to(float* tile, int lane) const {
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      *reinterpret_cast<float2*>(tile + tile_offset(j, lane)) = make_float2(s[j][0], s[j][1]);
    }
  }
  static __device__ __forceinline__ int tile_offset(int j, int lane) {
    return (8 * j + lane % 8) * kTile + lane / 8 * 2;
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

  // Updates S by a token. With kOutputs, returns o of column 2 (lane / 8) + lane % 2 of the tile.
  template <bool kOutputs>
  __device__ __forceinline__ float step(const Operands& x, int lane) {
    const auto xor_sum = [](float v, int distance) {
      return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, distance));
    };
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
    float o = 0;
    if constexpr (kOutputs) {
      float b[2];
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          b[c] = j == 0 ? __fmul_rn(x.q[j], s[j][c]) : __fmaf_rn(x.q[j], s[j][c], b[c]);
        }
      }
      const bool odd = lane % 2 != 0;
      o = __fadd_rn(odd ? b[1] : b[0], __shfl_xor_sync(0xffffffffu, odd ? b[0] : b[1], 1));
      o = __fmul_rn(x.decay, xor_sum(xor_sum(o, 2), 4));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      a[c] = xor_sum(xor_sum(a[c], 2), 4);
      d[c] = __fmul_rn(x.beta, __fmaf_rn(-x.decay, a[c], c == 0 ? x.v.x : x.v.y));
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
        s[j][c] = __fmaf_rn(x.k[j], d[c], __fmul_rn(s[j][c], x.decay));
      }
    }
    return __fmaf_rn(lane % 2 != 0 ? d[1] : d[0], x.kq, o);
  }
};

}  // namespace cpmcu::cuda::delta_net
