// The loops of simd.cpp, which includes this file once for each instruction set, in a namespace
// of its own. With CPMCU_SIMD_F16C it has AVX2 and converts float16 in hardware; both ways are
// exact.
//
// Dot products use GNU vectors. A tile has up to 4 rows of x and of w, so each loaded vector is
// used in several sums. Vectors are as wide as a register: g++ keeps wider ones in memory. Other
// loops are plain; g++ vectorises them.

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return to_float(x); }
// Unlike the one in core/half.h, this conversion multiplies no subnormals: that takes some hundred
// cycles on x86.
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
// every tiling and instruction set gives the same bits (but for fused multiply-adds).
constexpr int kLanes = 16;
// kWidth: floats in a register. kSums: registers that hold sums; the others hold rows and columns.
#ifdef CPMCU_SIMD_512
constexpr int kWidth = 16, kSums = 16;
#elif defined(CPMCU_SIMD_F16C)
constexpr int kWidth = 8, kSums = 8;
#else
constexpr int kWidth = 4, kSums = 8;
#endif
using Part = float __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));

template <typename V>
[[gnu::always_inline]] inline V load_vector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// Loads kWidth floats, or 2 kWidth 16-bit numbers with the even ones first, as in dot_operand.
[[gnu::always_inline]] inline void load_part(const float* w, Part (&out)[1]) {
  out[0] = load_vector<Part>(w);
}
[[gnu::always_inline]] inline void load_part(const bf16* w, Part (&out)[2]) {
  const Words words = load_vector<Words>(w);
  out[0] = reinterpret_cast<Part>(words << 16);
  out[1] = reinterpret_cast<Part>(words & 0xffff0000u);
}
#ifdef CPMCU_SIMD_512
// Masks of all lanes: g++ 12 warns of uninitialised values in the forms without a mask.
[[gnu::always_inline]] inline Part widen_fp16(Words bits) {
  const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(bits));
  return _mm512_maskz_cvtph_ps(0xffff, halves);
}
[[gnu::always_inline]] inline void load_part(const fp16* w, Part (&out)[2]) {
  const Words words = load_vector<Words>(w);
  out[0] = widen_fp16(words);
  out[1] = widen_fp16(words >> 16);
}
#elif defined(CPMCU_SIMD_F16C)
[[gnu::always_inline]] inline void load_part(const fp16* w, Part (&out)[2]) {
  using Halves = uint16_t __attribute__((vector_size(32)));
  const auto v = load_vector<Halves>(w);
  const auto even = __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14);
  const auto odd = __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15);
  out[0] = _mm256_cvtph_ps(reinterpret_cast<__m128i>(even));
  out[1] = _mm256_cvtph_ps(reinterpret_cast<__m128i>(odd));
}
#else
// As widen(fp16), for the low 16 bits of each word.
[[gnu::always_inline]] inline Part widen_fp16(Words bits) {
  const Words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const Words inf_or_nan = reinterpret_cast<Words>(magnitude >= 0x0f800000u) & 0x38000000u;
  const Words normal = magnitude + 0x38000000u + inf_or_nan;
  const Part subnormal = reinterpret_cast<Part>(magnitude + 0x38800000u) - 0x1p-14f;
  const Words is_small = reinterpret_cast<Words>(magnitude < 0x00800000u);
  return reinterpret_cast<Part>((is_small & reinterpret_cast<Words>(subnormal)) |
                                (~is_small & normal) | sign);
}
[[gnu::always_inline]] inline void load_part(const fp16* w, Part (&out)[2]) {
  const Words words = load_vector<Words>(w);
  out[0] = widen_fp16(words & 0xffffu);
  out[1] = widen_fp16(words >> 16);
}
#endif

[[gnu::always_inline]] inline float sum_of(const float (&lanes)[kLanes]) {
  using Four = float __attribute__((vector_size(16)));
  const Four four = (load_vector<Four>(lanes) + load_vector<Four>(lanes + 8)) +
                    (load_vector<Four>(lanes + 4) + load_vector<Four>(lanes + 12));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// out[m, n] for kX rows of x and kW of w. Each pass over k has up to kSums registers of sums. Rows
// of w are prefetched 8 rows ahead: from memory, that makes a core 1.6 to 2.3 times as fast.
template <int kX, int kW, typename T>
[[gnu::always_inline]] inline void dot_tile(const float* x, const T* const* w, int64_t length,
                                            float (*out)[kW]) {
  constexpr int kVectors = 4 / sizeof(T);  // registers that hold 64 bytes of w
  constexpr int kStep = kVectors * kLanes, kParts = std::min(kSums / (kX * kW), kLanes / kWidth);
  const int64_t whole = length / kStep * kStep;
  alignas(64) float lanes[kX][kW][kLanes];
  for (int first = 0; first < kLanes; first += kParts * kWidth) {
    Part sums[kX][kW][kParts] = {};
    for (int64_t k = 0; k < whole; k += kStep) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int lane = first + part * kWidth;
        Part columns[kW][kVectors];
#pragma GCC unroll 4
        for (int n = 0; n < kW; ++n) {
          load_part(w[n] + k + kVectors * lane, columns[n]);
          __builtin_prefetch(w[n] + k + kVectors * lane + 8 * length);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
          for (int m = 0; m < kX; ++m) {
            const Part row = load_vector<Part>(x + m * length + k + v * kLanes + lane);
#pragma GCC unroll 4
            for (int n = 0; n < kW; ++n) sums[m][n][part] += row * columns[n][v];
          }
        }
      }
    }
    for (int m = 0; m < kX; ++m) {
      for (int n = 0; n < kW; ++n) {
        std::memcpy(lanes[m][n] + first, sums[m][n], sizeof(sums[m][n]));
      }
    }
  }
  for (int m = 0; m < kX; ++m) {
    for (int n = 0; n < kW; ++n) {
      float sum = sum_of(lanes[m][n]);
      for (int64_t i = whole; i < length; ++i) sum += x[m * length + i] * widen(w[n][i]);
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
  constexpr int kNarrow = std::min(4, kSums / 4);  // rows of w in the tiles of 3 and 4 rows of x
  for (; num_x >= 4; num_x -= 4, x += 4 * length, out += 4 * out_stride) {
    dot_strip<4, kNarrow>(x, w, num_rows, length, out, out_stride);
  }
  if (num_x == 3) dot_strip<3, kNarrow>(x, w, num_rows, length, out, out_stride);
  if (num_x == 2) dot_strip<2, 4>(x, w, num_rows, length, out, out_stride);
  if (num_x == 1) dot_strip<1, 4>(x, w, num_rows, length, out, out_stride);
}

// Adds the columns up to the last whole vector and returns their number.
template <typename T>
[[gnu::always_inline]] inline int64_t add_scaled_vectors(float, const T*, int64_t, float*) {
  return 0;
}
#ifdef CPMCU_SIMD_F16C
[[gnu::always_inline]] inline int64_t add_scaled_vectors(float scale, const fp16* row,
                                                         int64_t length, float* sum) {
  int64_t k = 0;
  for (; k + 8 <= length; k += 8) {
    const __m256 columns = _mm256_cvtph_ps(load_vector<__m128i>(row + k));
    const __m256 next = load_vector<__m256>(sum + k) + scale * columns;
    std::memcpy(sum + k, &next, sizeof(next));
  }
  return k;
}
#endif

template <typename T>
[[gnu::always_inline]] inline void add_scaled_rows_of(const float* __restrict__ p,
                                                      const T* __restrict__ w, int64_t num_rows,
                                                      int64_t length, float* __restrict__ sum) {
  for (int64_t n = 0; n < num_rows; ++n) {
    const T* row = w + n * length;
    const float scale = p[n];
    const int64_t done = add_scaled_vectors(scale, row, length, sum);
#pragma omp simd
    for (int64_t k = done; k < length; ++k) sum[k] += scale * widen(row[k]);
  }
}

// There are 8 rows g of 16 words. Word j of a row has quad j / 4, half step j / 2 % 2 and m16 tile
// j % 2. Nibble i of it is of weight row 16 tile + 8 (i % 2) + g and of vector i / 2 of x (see
// strip_fragments).
void add_int4_strip(const uint32_t* __restrict__ words, const float* __restrict__ scales,
                    const float* __restrict__ x, int64_t x_stride, int64_t num_x,
                    float* __restrict__ sums) {
  for (int g = 0; g < 8; ++g) {
    // Scales of nibbles 0, 2, 4, 6 and of nibbles 1, 3, 5, 7.
    float low_scales[16], high_scales[16];
#pragma omp simd
    for (int j = 0; j < 16; ++j) {
      low_scales[j] = j % 2 ? scales[16 + g] : scales[g];
      high_scales[j] = j % 2 ? scales[24 + g] : scales[8 + g];
    }
    alignas(64) float w[4][8][16];  // weights of 128 k
    for (int step = 0; step < 4; ++step) {
      const uint32_t* row = words + 128 * step + 16 * g;
      for (int i = 0; i < 8; ++i) {
#pragma omp simd
        for (int j = 0; j < 16; ++j) {
          const uint32_t top = (row[j] ^ 0x88888888u) << (28 - 4 * i);
          // The nibble as a number: q - 8.
          w[step][i][j] = static_cast<float>(static_cast<int32_t>(top) >> 28);
        }
      }
    }
    for (int64_t m = 0; m < num_x; ++m) {
      float* low = sums + m * kStripSums + 32 * g;
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

void dot_rows(const float* x, int64_t num_x, const float* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}
void dot_rows(const float* x, int64_t num_x, const fp16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}
void dot_rows(const float* x, int64_t num_x, const bf16* w, int64_t num_rows, int64_t length,
              float* out, int64_t out_stride) {
  dot_rows_of(x, num_x, w, num_rows, length, out, out_stride);
}

void add_scaled_rows(const float* p, const float* w, int64_t num_rows, int64_t length, float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}
void add_scaled_rows(const float* p, const fp16* w, int64_t num_rows, int64_t length, float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}
void add_scaled_rows(const float* p, const bf16* w, int64_t num_rows, int64_t length, float* sum) {
  add_scaled_rows_of(p, w, num_rows, length, sum);
}
