// See simd.h. Dot products use GNU vectors and tiles of 4 rows of x by 2 rows of w, so each loaded
// vector serves several sums. The other loops are plain; g++ vectorises them. There is one clone
// for each instruction set: AVX-512, AVX2 with FMA, the baseline.
#include "kernels/cpu/simd.h"

#include <algorithm>
#include <bit>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to functions that are inlined

// A resolver picks the clone before the sanitizers are ready, so sanitizer builds have no clones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CPMCU_CLONES                           \
  __attribute__((optimize("fp-contract=fast"), \
                 target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CPMCU_CLONES
#endif

namespace cpmcu::cpu {
namespace {

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return to_float(x); }
// Unlike core/half.h it multiplies no subnormals, which take some hundred cycles on x86.
inline float widen(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t inf_or_nan = magnitude >= 0x0f800000u ? 0x38000000u : 0u;
  const uint32_t normal = magnitude + 0x38000000u + inf_or_nan;
  const float subnormal = std::bit_cast<float>(magnitude + 0x38800000u) - 0x1p-14f;
  const uint32_t bits = magnitude < 0x00800000u ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

// A sum over k has 16 lanes, which are added pairwise at the end. The code fixes this order, so
// every tiling gives the same bits.
using Lanes = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
constexpr int kLanes = 16;

template <typename V>
[[gnu::always_inline]] inline V load_vector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
// As widen(fp16), for the low 16 bits of each word.
[[gnu::always_inline]] inline Lanes widen_fp16(Words bits) {
  const Words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const Words inf_or_nan = reinterpret_cast<Words>(magnitude >= 0x0f800000u) & 0x38000000u;
  const Words normal = magnitude + 0x38000000u + inf_or_nan;
  const Lanes subnormal = reinterpret_cast<Lanes>(magnitude + 0x38800000u) - 0x1p-14f;
  const Words is_small = reinterpret_cast<Words>(magnitude < 0x00800000u);
  return reinterpret_cast<Lanes>((is_small & reinterpret_cast<Words>(subnormal)) |
                                 (~is_small & normal) | sign);
}

// Loads 64 bytes: 16 floats, or 32 16-bit numbers with the even ones first, as in dot_operand.
[[gnu::always_inline]] inline void load_lanes(const float* w, Lanes (&out)[1]) {
  out[0] = load_vector<Lanes>(w);
}
[[gnu::always_inline]] inline void load_lanes(const bf16* w, Lanes (&out)[2]) {
  const Words words = load_vector<Words>(w);
  out[0] = reinterpret_cast<Lanes>(words << 16);
  out[1] = reinterpret_cast<Lanes>(words & 0xffff0000u);
}
[[gnu::always_inline]] inline void load_lanes(const fp16* w, Lanes (&out)[2]) {
  const Words words = load_vector<Words>(w);
  out[0] = widen_fp16(words & 0xffffu);
  out[1] = widen_fp16(words >> 16);
}

[[gnu::always_inline]] inline float sum_of(Lanes v) {
  const auto eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// out[m, n] for kX rows of x and kW of w.
template <int kX, int kW, typename T>
[[gnu::always_inline]] inline void dot_tile(const float* x, const T* const* w, int64_t length,
                                            float (*out)[kW]) {
  constexpr int kVectors = 4 / sizeof(T);  // in 64 bytes of w
  Lanes sums[kX][kW] = {};
  int64_t k = 0;
  for (; k + kVectors * kLanes <= length; k += kVectors * kLanes) {
    Lanes columns[kW][kVectors];
    for (int n = 0; n < kW; ++n) load_lanes(w[n] + k, columns[n]);
    for (int v = 0; v < kVectors; ++v) {
      for (int m = 0; m < kX; ++m) {
        const Lanes row = load_vector<Lanes>(x + m * length + k + v * kLanes);
        for (int n = 0; n < kW; ++n) sums[m][n] += row * columns[n][v];
      }
    }
  }
  for (int m = 0; m < kX; ++m) {
    for (int n = 0; n < kW; ++n) {
      float sum = sum_of(sums[m][n]);
      for (int64_t i = k; i < length; ++i) sum += x[m * length + i] * widen(w[n][i]);
      out[m][n] = sum;
    }
  }
}

// kX rows of x by kW rows of w at a time. If fewer rows of w are left, the last one is repeated.
template <int kX, int kW, typename T>
[[gnu::always_inline]] inline void dot_strip(const float* x, const T* w, int64_t num_rows,
                                             int64_t length, float* out, int64_t out_stride) {
  for (int64_t n = 0; n < num_rows; n += kW) {
    const T* rows[kW];
    for (int i = 0; i < kW; ++i) rows[i] = w + std::min(n + i, num_rows - 1) * length;
    float sums[kX][kW];
    dot_tile<kX, kW>(x, rows, length, sums);
    for (int m = 0; m < kX; ++m) {
      for (int64_t i = 0; i < std::min<int64_t>(kW, num_rows - n); ++i) {
        out[m * out_stride + n + i] = sums[m][i];
      }
    }
  }
}

template <typename T>
[[gnu::always_inline]] inline void dot_rows_of(const float* x, int64_t num_x, const T* w,
                                               int64_t num_rows, int64_t length, float* out,
                                               int64_t out_stride) {
  int64_t m = 0;
  for (; m + 4 <= num_x; m += 4) {
    dot_strip<4, 2>(x + m * length, w, num_rows, length, out + m * out_stride, out_stride);
  }
  for (; m < num_x; ++m) {
    dot_strip<1, 4>(x + m * length, w, num_rows, length, out + m * out_stride, out_stride);
  }
}

template <typename T>
[[gnu::always_inline]] inline void add_scaled_rows_of(const float* __restrict__ p,
                                                      const T* __restrict__ w, int64_t num_rows,
                                                      int64_t length, float* __restrict__ sum) {
  for (int64_t n = 0; n < num_rows; ++n) {
    const T* row = w + n * length;
    const float scale = p[n];
#pragma omp simd
    for (int64_t k = 0; k < length; ++k) sum[k] += scale * widen(row[k]);
  }
}

// There are 8 rows g of 16 words. Word j of a row has quad j / 4, half step j / 2 % 2 and m16 tile
// j % 2. Nibble i of it is of weight row 16 tile + 8 (i % 2) + g and of vector i / 2 of x (see
// w4_fragments).
[[gnu::always_inline]] inline void add_w4_strip_of(const uint32_t* __restrict__ words,
                                                   const float* __restrict__ scales,
                                                   const float* __restrict__ x, int64_t x_stride,
                                                   int64_t num_x, float* __restrict__ sums) {
  for (int g = 0; g < 8; ++g) {
    float low_scales[16], high_scales[16];  // of nibbles 0, 2, 4, 6 and of 1, 3, 5, 7
#pragma omp simd
    for (int j = 0; j < 16; ++j) {
      low_scales[j] = j % 2 ? scales[16 + g] : scales[g];
      high_scales[j] = j % 2 ? scales[24 + g] : scales[8 + g];
    }
    alignas(64) float w[4][8][16];  // of 128 k
    for (int step = 0; step < 4; ++step) {
      const uint32_t* row = words + 128 * step + 16 * g;
      for (int i = 0; i < 8; ++i) {
#pragma omp simd
        for (int j = 0; j < 16; ++j) {
          const uint32_t top = (row[j] ^ 0x88888888u) << (28 - 4 * i);
          w[step][i][j] = static_cast<float>(static_cast<int32_t>(top) >> 28);  // q - 8
        }
      }
    }
    for (int64_t m = 0; m < num_x; ++m) {
      float* low = sums + m * kW4StripSums + 32 * g;
      float* high = low + 16;
      alignas(64) float low_sum[16] = {}, high_sum[16] = {};
      for (int step = 0; step < 4; ++step) {
        const float* xs = x + m * x_stride + 64 * step;
        for (int i = 0; i < 4; ++i) {
#pragma omp simd
          for (int j = 0; j < 16; ++j) {
            low_sum[j] += w[step][2 * i][j] * xs[16 * i + j];
            high_sum[j] += w[step][2 * i + 1][j] * xs[16 * i + j];
          }
        }
      }
#pragma omp simd
      for (int j = 0; j < 16; ++j) {
        low[j] += low_scales[j] * low_sum[j];
        high[j] += high_scales[j] * high_sum[j];
      }
    }
  }
}

}  // namespace

CPMCU_CLONES void add_w4_strip(const uint32_t* words, const float* scales, const float* x,
                               int64_t x_stride, int64_t num_x, float* sums) {
  add_w4_strip_of(words, scales, x, x_stride, num_x, sums);
}

// Vector i of 32 k: k = 16 (j / 2 % 2) + 8 (i % 2) + 2 (j / 4) + i / 2 in lane j.
void w4_fragments(const float* x, int64_t k, float* out) {
  for (int at = 0; at < kW4FragmentFloats; ++at) {
    const int step = at / 64, i = at / 16 % 4, j = at % 16;
    const int from = 32 * step + 16 * (j / 2 % 2) + 8 * (i % 2) + 2 * (j / 4) + i / 2;
    out[at] = from < k ? x[from] : 0;
  }
}

float w4_strip_row(const float* sums, int row) {
  const float* at = sums + 32 * (row % 8) + 16 * (row / 8 % 2) + row / 16;
  return ((at[0] + at[2]) + (at[4] + at[6])) + ((at[8] + at[10]) + (at[12] + at[14]));
}

CPMCU_CLONES void dot_rows(const float* x, int64_t num_x, const float* w, int64_t num_rows,
                           int64_t length, float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}
CPMCU_CLONES void dot_rows(const float* x, int64_t num_x, const fp16* w, int64_t num_rows,
                           int64_t length, float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}
CPMCU_CLONES void dot_rows(const float* x, int64_t num_x, const bf16* w, int64_t num_rows,
                           int64_t length, float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}

CPMCU_CLONES void add_scaled_rows(const float* p, const float* w, int64_t num_rows, int64_t length,
                                  float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}
CPMCU_CLONES void add_scaled_rows(const float* p, const fp16* w, int64_t num_rows, int64_t length,
                                  float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}
CPMCU_CLONES void add_scaled_rows(const float* p, const bf16* w, int64_t num_rows, int64_t length,
                                  float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}

}  // namespace cpmcu::cpu
