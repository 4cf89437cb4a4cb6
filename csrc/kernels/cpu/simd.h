// The hot loops of the CPU back end, compiled for several instruction sets; one is selected at load
// time.
//
// The order of each sum does not depend on the number of rows. So a result depends only on its own
// row and on `length`. Rows are `length` elements apart; sums are float32.
#pragma once

#include <cstdint>
#include <vector>

#include "core/half.h"

namespace cpmcu::cpu {

// `count` numbers in `buffer` that begin at a cache line: loads across two lines are slower.
inline float* aligned_floats(int64_t count, std::vector<float>& buffer) {
  constexpr size_t kLine = 64;
  const size_t needed = static_cast<size_t>(count) + kLine / sizeof(float);
  if (buffer.size() < needed) buffer.resize(needed);
  const size_t past = reinterpret_cast<uintptr_t>(buffer.data()) % kLine;
  return buffer.data() + (kLine - past) % kLine / sizeof(float);
}

// The rows of x as dot_rows reads them, for w of the same type. float32 rows stay as they are.
// 16-bit rows are converted to float32 in `buffer`; of each 32 numbers the even ones come first,
// which is the order in which dot_rows unpacks w.
inline const float* dot_operand(const float* x, int64_t, int64_t, std::vector<float>&) { return x; }
template <typename T>
const float* dot_operand(const T* x, int64_t num_x, int64_t length, std::vector<float>& buffer) {
  float* rows = aligned_floats(num_x * length, buffer);
  const int64_t whole = length / 32 * 32;
  for (int64_t m = 0; m < num_x; ++m) {
    const T* from = x + m * length;
    float* to = rows + m * length;
    for (int64_t k = 0; k < whole; k += 32) {
      for (int i = 0; i < 16; ++i) {
        to[k + i] = to_float(from[k + 2 * i]);
        to[k + 16 + i] = to_float(from[k + 2 * i + 1]);
      }
    }
    for (int64_t k = whole; k < length; ++k) to[k] = to_float(from[k]);
  }
  return rows;
}
// out[m, n] = sum_k x[m, k] * w[n, k]. x is a dot_operand; rows of out are `out_stride` elements
// apart.
void dot_rows(const float* x, int64_t num_x, const float* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride);
void dot_rows(const float* x, int64_t num_x, const fp16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride);
void dot_rows(const float* x, int64_t num_x, const bf16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride);

// sum[k] += sum over n of p[n] * w[n, k], in the order of n.
void add_scaled_rows(const float* p, const float* w, int64_t num_rows, int64_t length, float* sum);
void add_scaled_rows(const float* p, const fp16* w, int64_t num_rows, int64_t length, float* sum);
void add_scaled_rows(const float* p, const bf16* w, int64_t num_rows, int64_t length, float* sum);

// A strip is 32 rows of a 4-bit weight block, 512 words (kernels/gemm/packed/packed.h). Its
// accumulators are kStripSums floats in fragment order; strip_row adds those of one row.
constexpr int kStripRows = 32;
constexpr int kStripSums = 256;
constexpr int kFragmentFloats = 256;  // 128 inputs (k) of one row of x
// Writes x [k], padded with zeros to 128, in the order in which add_int4_strip reads it.
void strip_fragments(const float* x, int64_t k, float* out);
// sums[m] += scale[row] * sum over k of (q - 8) * x[m, k], for the 128 k of a strip. Rows x[m] are
// `x_stride` floats apart; scales [32] are one for each row.
void add_int4_strip(const uint32_t* words, const float* scales, const float* x, int64_t x_stride,
                    int64_t num_x, float* sums);
float strip_row(const float* sums, int row);

// `x` as float32: unchanged if it is float32, else converted in `buffer`.
inline const float* as_floats(const float* x, int64_t, std::vector<float>&) { return x; }
template <typename T>
const float* as_floats(const T* x, int64_t count, std::vector<float>& buffer) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  for (int64_t i = 0; i < count; ++i) buffer[i] = to_float(x[i]);
  return buffer.data();
}

}  // namespace cpmcu::cpu
