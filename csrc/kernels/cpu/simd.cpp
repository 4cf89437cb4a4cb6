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

}  // namespace

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
