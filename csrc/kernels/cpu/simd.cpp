// See simd.h. simd_loops.h is compiled for AVX-512, for AVX2 with FMA and F16C, and for the
// baseline. Loading the module asks the processor which one to call. There is no resolver of the
// dynamic linker (target_clones): it would run before AddressSanitizer is ready.
#include "kernels/cpu/simd.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CPMCU_SIMD_X86
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to functions that are inlined

namespace cpmcu::cpu {

#ifdef CPMCU_SIMD_X86
#pragma GCC optimize("O3", "fp-contract=fast")
#endif
namespace baseline {
namespace {
#include "kernels/cpu/simd_loops.h"
}
}  // namespace baseline

#ifdef CPMCU_SIMD_X86
#define CPMCU_SIMD_F16C
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace v3 {
namespace {
#include "kernels/cpu/simd_loops.h"
}
}  // namespace v3
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define CPMCU_SIMD_512
namespace v4 {
namespace {
#include "kernels/cpu/simd_loops.h"
}
}  // namespace v4
#pragma GCC pop_options
#endif

namespace {

// Calls f of the namespace for this processor.
#ifdef CPMCU_SIMD_X86
const int kLevel = __builtin_cpu_supports("x86-64-v4")   ? 4
                   : __builtin_cpu_supports("x86-64-v3") ? 3
                                                         : 1;
#define CPMCU_SIMD_CALL(f, ...) \
  (kLevel == 4 ? v4::f(__VA_ARGS__) : kLevel == 3 ? v3::f(__VA_ARGS__) : baseline::f(__VA_ARGS__))
#else
#define CPMCU_SIMD_CALL(f, ...) baseline::f(__VA_ARGS__)
#endif

}  // namespace

void add_int4_strip(const uint32_t* words, const float* scales, const float* x, int64_t x_stride,
                    int64_t num_x, float* sums) {
  CPMCU_SIMD_CALL(add_int4_strip, words, scales, x, x_stride, num_x, sums);
}

// Vector i of 32 k: k = 16 (j / 2 % 2) + 8 (i % 2) + 2 (j / 4) + i / 2 in lane j.
void strip_fragments(const float* x, int64_t k, float* out) {
  for (int at = 0; at < kFragmentFloats; ++at) {
    const int step = at / 64, i = at / 16 % 4, j = at % 16;
    const int from = 32 * step + 16 * (j / 2 % 2) + 8 * (i % 2) + 2 * (j / 4) + i / 2;
    out[at] = from < k ? x[from] : 0;
  }
}

float strip_row(const float* sums, int row) {
  const float* at = sums + 32 * (row % 8) + 16 * (row / 8 % 2) + row / 16;
  return ((at[0] + at[2]) + (at[4] + at[6])) + ((at[8] + at[10]) + (at[12] + at[14]));
}

void dot_rows(const float* x, int64_t num_x, const float* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  CPMCU_SIMD_CALL(dot_rows, x, num_x, w, num_rows, length, out, out_stride);
}
void dot_rows(const float* x, int64_t num_x, const fp16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  CPMCU_SIMD_CALL(dot_rows, x, num_x, w, num_rows, length, out, out_stride);
}
void dot_rows(const float* x, int64_t num_x, const bf16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  CPMCU_SIMD_CALL(dot_rows, x, num_x, w, num_rows, length, out, out_stride);
}

void add_scaled_rows(const float* p, const float* w, int64_t num_rows, int64_t length, float* sum) {
  CPMCU_SIMD_CALL(add_scaled_rows, p, w, num_rows, length, sum);
}
void add_scaled_rows(const float* p, const fp16* w, int64_t num_rows, int64_t length, float* sum) {
  CPMCU_SIMD_CALL(add_scaled_rows, p, w, num_rows, length, sum);
}
void add_scaled_rows(const float* p, const bf16* w, int64_t num_rows, int64_t length, float* sum) {
  CPMCU_SIMD_CALL(add_scaled_rows, p, w, num_rows, length, sum);
}

}  // namespace cpmcu::cpu
