// See simd.h. Plain loops that g++ vectorises: `omp simd` lets it keep a sum in several lanes,
// which it must not do by itself. One clone per instruction set: AVX-512, AVX2 with FMA, the
// baseline.
#include "kernels/cpu/simd.h"

#include <algorithm>
#include <bit>

// A clone is picked by a resolver that runs before the sanitizers are ready, hence not under them.
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
// Without multiplying subnormals, which core/half.h does: x86 is some hundred cycles slower on
// those.
inline float widen(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t inf_or_nan = magnitude >= 0x0f800000u ? 0x38000000u : 0u;
  const uint32_t normal = magnitude + 0x38000000u + inf_or_nan;
  const float subnormal = std::bit_cast<float>(magnitude + 0x38800000u) - 0x1p-14f;
  const uint32_t bits = magnitude < 0x00800000u ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

// Four rows at a time; where fewer are left the last one is repeated, so that no row takes another
// path through the code.
template <typename T>
[[gnu::always_inline]] inline void dot_rows_of(const float* __restrict__ x, const T* __restrict__ w,
                                               int64_t num_rows, int64_t length,
                                               float* __restrict__ out) {
  for (int64_t n = 0; n < num_rows; n += 4) {
    const int64_t last = num_rows - 1;
    const T* w0 = w + n * length;
    const T* w1 = w + std::min(n + 1, last) * length;
    const T* w2 = w + std::min(n + 2, last) * length;
    const T* w3 = w + std::min(n + 3, last) * length;
    float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3) simdlen(16)
    for (int64_t k = 0; k < length; ++k) {
      sum0 += x[k] * widen(w0[k]);
      sum1 += x[k] * widen(w1[k]);
      sum2 += x[k] * widen(w2[k]);
      sum3 += x[k] * widen(w3[k]);
    }
    const float sums[4] = {sum0, sum1, sum2, sum3};
    for (int64_t i = 0; i < std::min<int64_t>(4, num_rows - n); ++i) out[n + i] = sums[i];
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

// Eight rows g, each 16 words: lane j of them is q = j / 4, half a step j / 2 % 2, tile j % 2.
// Nibble i is row 16 tile + 8 (i % 2) + g, and k belongs to x's vector i / 2 (see w4_fragments).
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

CPMCU_CLONES void dot_rows(const float* x, const float* w, int64_t num_rows, int64_t length,
                           float* out) {
  dot_rows_of(x, w, num_rows, length, out);
}
CPMCU_CLONES void dot_rows(const float* x, const fp16* w, int64_t num_rows, int64_t length,
                           float* out) {
  dot_rows_of(x, w, num_rows, length, out);
}
CPMCU_CLONES void dot_rows(const float* x, const bf16* w, int64_t num_rows, int64_t length,
                           float* out) {
  dot_rows_of(x, w, num_rows, length, out);
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
