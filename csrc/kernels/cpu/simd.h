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

// `x` as float32: itself, or converted into `buffer`.
inline const float* as_floats(const float* x, int64_t, std::vector<float>&) { return x; }
template <typename T>
const float* as_floats(const T* x, int64_t count, std::vector<float>& buffer) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  for (int64_t i = 0; i < count; ++i) buffer[i] = to_float(x[i]);
  return buffer.data();
}

}  // namespace cpmcu::cpu
