// The hot loops of the CPU back end, compiled for several instruction sets and picked at load time.
//
// Every row goes through the same machine code, whatever the number of rows: so a result depends on
// its own row and on `length` alone. Rows are `length` elements apart; sums are float32.
#pragma once

#include <cstdint>
#include <vector>

#include "core/half.h"

namespace cpmcu::cpu {

// out[n] = sum_k x[k] * w[n, k]
void dot_rows(const float* x, const float* w, int64_t num_rows, int64_t length, float* out);
void dot_rows(const float* x, const fp16* w, int64_t num_rows, int64_t length, float* out);
void dot_rows(const float* x, const bf16* w, int64_t num_rows, int64_t length, float* out);

// sum[k] += p[n] * w[n, k], n in order
void add_scaled_rows(const float* p, const float* w, int64_t num_rows, int64_t length, float* sum);
void add_scaled_rows(const float* p, const fp16* w, int64_t num_rows, int64_t length, float* sum);
void add_scaled_rows(const float* p, const bf16* w, int64_t num_rows, int64_t length, float* sum);

// A strip is 32 rows of a block of 4-bit weights, 512 words (kernels/gemm/w4a16.h), and its sums
// are kept as the fragments have them: kW4StripSums floats, of which w4_strip_row adds those of a
// row.
constexpr int kW4StripRows = 32;
constexpr int kW4StripSums = 256;
constexpr int kW4FragmentFloats = 256;  // of one row of x and 128 k
// x [k], zeros up to 128, in the order in which add_w4_strip reads it.
void w4_fragments(const float* x, int64_t k, float* out);
// sums[m] += scale[row] * sum over k of (q - 8) * x[m, k] for the 128 k of a strip. x[m] are
// `x_stride` floats apart; scales [32] by rows.
void add_w4_strip(const uint32_t* words, const float* scales, const float* x, int64_t x_stride,
                  int64_t num_x, float* sums);
float w4_strip_row(const float* sums, int row);

// `x` as float32: itself, or converted into `buffer`.
inline const float* as_floats(const float* x, int64_t, std::vector<float>&) { return x; }
template <typename T>
const float* as_floats(const T* x, int64_t count, std::vector<float>& buffer) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  for (int64_t i = 0; i < count; ++i) buffer[i] = to_float(x[i]);
  return buffer.data();
}

}  // namespace cpmcu::cpu
