// Epilogue of the fused layer kernel: adds the slices of K and writes y, one epilogue tile a warp.
#pragma once

#include "kernels/gemm/fused_layer/outputs.cuh"
#include "kernels/ranks/words.cuh"

namespace cpmcu::cuda::fused {

// An epilogue tile has two m16 tiles (16 rows of W each) and 8 rows of x. A lane has rows row and
// row + 1 of x. It has rows n and n + 8 of W of both m16 tiles, in the order of weight blocks.
// Inputs other than sums (old y, norm weights, bias, angles) are loaded before x arrives.
template <typename T, int kGroups, bool kSumsRanks>
struct EpilogueTiles {
  const FusedLayerArgs& args;
  const GemmArgs& gemm;
  T* y;
  int n0;               // number of the tile's first row of W, in stored order
  int first_warp_tile;  // first warp tile that this CTA owns
  bool rotated;
  int g, q2;  // the lane's row of W within 8 rows, and its first row of x within 8 rows
  // `old`: y before the launch. `weight`: norm weights, or the bias of rotary_kv or y.
  T old[2][2][2], weight[2][2];
  TokenRotation rotations[2];

  // The first m16 tile of an epilogue tile.
  __device__ __forceinline__ int first_m16_tile(int epilogue_tile) const {
    const int warp_tile = first_warp_tile + epilogue_tile / kGroups;
    return 2 * warp_tile - (warp_tile & (gemm.rope_pair_stride - 1));
  }
  struct Place {
    int epilogue_tile, m16_tile, row, n;
  };
  __device__ __forceinline__ Place place_of(int epilogue_tile) const {
    const int m16_tile = first_m16_tile(epilogue_tile);
    return {epilogue_tile, m16_tile, epilogue_tile % kGroups * 8 + q2, n0 + m16_tile * 16 + g};
  }

  __device__ __forceinline__ void load_weights(int epilogue_tile) {
    const auto* weights = static_cast<const T*>(rotated                ? args.rotary.bias
                                                : gemm.bias == nullptr ? gemm.norm_weight
                                                                       : gemm.bias);
    if (weights == nullptr) return;
    const int n = place_of(epilogue_tile).n;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = n + t * gemm.rope_pair_stride * 16 + half * 8;
        if (at < gemm.n) weight[t][half] = weights[at];
      }
    }
  }
  __device__ __forceinline__ void load_old(int epilogue_tile) {
    if (gemm.beta == 0) return;
    const auto [_, m16_tile, row, n] = place_of(epilogue_tile);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= args.m) continue;
      const T* from = y + int64_t{row + j} * gemm.n + n;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (n + t * 16 + half * 8 < gemm.n) old[t][half][j] = from[t * 16 + half * 8];
        }
      }
    }
  }
  __device__ __forceinline__ void load_rotations(int epilogue_tile) {
    const auto [_, m16_tile, row, n] = place_of(epilogue_tile);
    const int dims = gemm.rope_pair_stride * 32;
    const bool is_value = n / dims >= args.rotary.num_heads + args.rotary.num_kv_heads;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j < args.m) rotations[j].load(args.rotary, row + j, n % dims, is_value);
    }
  }

  // Adds the slices of an epilogue tile in order. `fragments`: those of the first slice; each slice
  // has num_fragments. If arrivals are not counted, polls until all fragments are ready, then
  // restores kNotReady in the buffer. kClears: frees registers of the main loop.
  template <bool kCounted, bool kClears>
  __device__ __forceinline__ void add_slices(float (&sum)[2][4], const Place& at, char* fragments,
                                             int num_fragments) const {
    if (at.row >= args.m) return;
    const auto fragments_of = [&](int t) {
      const int m16_tile = at.m16_tile + t * gemm.rope_pair_stride;
      return fragments +
             ((m16_tile / 2 * kGroups + at.epilogue_tile % kGroups) * 2 + m16_tile % 2) * 512;
    };
    char* const from[2] = {fragments_of(0), fragments_of(1)};
    uint4 v[8][2];
    const auto each = [&](auto f) {
#pragma unroll
      for (int s = 0; s < 8; ++s) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (s < gemm.slices) f(v[s][t], t, from[t] + s * num_fragments * 16);
        }
      }
    };
    // `v` is written under a condition. Without a first value, its 64 registers are kept from tile
    // to tile, so a main loop that needs many registers spills.
    if constexpr (kClears) {
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i / 2][i % 2] = {};
    }
    bool missing;
    do {
      missing = false;
      each([&](uint4& fragment, int, const char* from) { fragment = ptx::load_relaxed16(from); });
      if constexpr (!kCounted) {
        each([&](const uint4& fragment, int, char*) {
          missing |= fragment.x == kNotReady || fragment.y == kNotReady ||
                     fragment.z == kNotReady || fragment.w == kNotReady;
        });
      }
    } while (missing);
    each([&](const uint4& fragment, int t, char* from) {
      sum[t][0] += __uint_as_float(fragment.x), sum[t][1] += __uint_as_float(fragment.y);
      sum[t][2] += __uint_as_float(fragment.z), sum[t][3] += __uint_as_float(fragment.w);
      if constexpr (!kCounted) {
        *reinterpret_cast<uint4*>(from) = make_uint4(kNotReady, kNotReady, kNotReady, kNotReady);
      }
    });
  }

  __device__ __forceinline__ void store_rotated(const Place& at, const float (&sum)[2][4],
                                                const float* row_scales) const {
    const auto [_, m16_tile, row, n] = at;
    if (n >= gemm.n) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= args.m) continue;
      fused::store_rotated(gemm, args.rotary, rotations[j], weight, sum, j, row_scales[row + j], n,
                           y + int64_t{row + j} * gemm.n);
    }
  }
  // Sends this rank's part of y to the other ranks. Then `sum` becomes the sum of all parts and of
  // the old y (kernels/ranks/rank_sum.h).
  __device__ __forceinline__ void add_ranks(const Place& place, float (&sum)[2][4],
                                            const float* row_scales,
                                            const RankRounds& rounds) const {
    const auto [_, m16_tile, row, n] = place;
    const int block = (n0 + m16_tile * 16) / 32, num_blocks = (gemm.n + 31) / 32;
    if (row >= args.m || block >= num_blocks) return;
    const auto word_of = [&](int t, int half) {
      return pack2<T>(__fmul_rn(row_scales[row], sum[t][half * 2]),
                      __fmul_rn(row_scales[row + 1], sum[t][half * 2 + 1]));
    };
    const uint4 own = {word_of(0, 0), word_of(0, 1), word_of(1, 0), word_of(1, 1)};
    const uint32_t round = rounds.before + gemm.rank_sum;
    const int64_t at = (int64_t{row / 2} * num_blocks + block) * 32 + g * 4;
    const int64_t half_buffer = round % 2 * args.exchange.half_words();
    if (!rounds.is_silent) send4(args.exchange, half_buffer, at, own, round);
    const uint64_t* buffer = args.exchange.buffers[args.exchange.rank] + half_buffer;
    bool waits = rounds.waits;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][i] = gemm.beta == 0 ? 0 : to_float(old[t][i / 2][i % 2]);
    }
#pragma unroll 1
    for (int from = 0; from < args.exchange.num_ranks; ++from) {
      const uint4 words = from == args.exchange.rank
                              ? own
                              : receive4(args.exchange, buffer, from, at, round, waits);
      const uint32_t all[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 parts = unpack2<T>(all[t][half]);
          sum[t][half * 2] += parts.x, sum[t][half * 2 + 1] += parts.y;
        }
      }
    }
  }

  // Stores y; if a norm follows, also y * (norm_weight + norm_offset), and adds the squares of both
  // rows.
  __device__ __forceinline__ void store(const Place& place, const float (&sum)[2][4],
                                        const float* row_scales, float (&squares)[2]) const {
    const auto [_, m16_tile, row, n] = place;
    const int left = gemm.n - n;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row + j >= args.m) continue;
      const float scale = row_scales[row + j];
      if (gemm.gated) {
        T* to = y + int64_t{row + j} * (gemm.n / 2) + n / 16 * 8 + g;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (t * 16 >= left) continue;
          to[t * 8] = from_float<T>(
              silu_product(__fmul_rn(scale, sum[t][j]), __fmul_rn(scale, sum[t][j + 2])));
        }
        continue;
      }
      const int64_t at = int64_t{row + j} * gemm.n + n;
      T* const to = y + at;
      T* const normed = static_cast<T*>(gemm.normed) + at;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (t * 16 + half * 8 >= left) continue;
          const T value =
              kSumsRanks && gemm.rank_sum > 0 ? from_float<T>(sum[t][half * 2 + j])
              : gemm.bias == nullptr
                  ? finished(gemm, scale, sum[t][half * 2 + j], old[t][half][j])
                  : biased(gemm, scale, sum[t][half * 2 + j], old[t][half][j], weight[t][half]);
          to[t * 16 + half * 8] = value;
          if (gemm.normed != nullptr) {
            normed[t * 16 + half * 8] =
                bounded<T>(to_float(value) * (to_float(weight[t][half]) + gemm.norm_offset));
            squares[j] += to_float(value) * to_float(value);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void add_squares(int row, const float (&squares)[2],
                                              ExactSum* of_rows) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float v = squares[j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
      if (g == 0 && row + j < args.m) of_rows[row + j].add(v);
    }
  }
};

}  // namespace cpmcu::cuda::fused
