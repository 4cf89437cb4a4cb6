// Unpacks each strip of 32 weight rows once and multiplies it with up to 64 rows of x while in
// cache.
#include "kernels/gemm/packed/int4_pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/packed_decoded.h"
#include "kernels/cpu/simd.h"

namespace cpmcu::cpu {
namespace {

constexpr int64_t kMaxRows = 64;  // rows of x that are multiplied at a time
constexpr int kScalesAt = 16384;  // offset of the scales in a weight block, in bytes
// Byte offset of zero points in a block.
int zeros_at(const PackedLayout& layout) { return kScalesAt + 2 * kPackedRows * layout.groups(); }

uint8_t* block_of(const PackedWeight& w, int64_t row_block, int64_t k_block) {
  return static_cast<uint8_t*>(w.blocks) + (row_block * w.k_blocks() + k_block) * w.block_bytes();
}

using BlockQ = uint8_t[kPackedRows][kPackedK];

// Writes rows [begin, end) of a block. Nibbles of other rows in the same words keep their values.
void write_q(uint8_t* block, const BlockQ& q, int begin, int end) {
  auto* words = reinterpret_cast<uint32_t*>(block);
  for (int row = begin; row < end; ++row) {
    const uint32_t mask = row / 8 % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
    for (int step = 0; step < kPackedK / 16; ++step) {
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t made = 0;
        for (int k : {0, 1, 8, 9}) {
          const int at = 16 * step + 2 * pair + k;
          made |= uint32_t{q[row][at]} << nibble_place(row, at).shift;
        }
        uint32_t& word = words[nibble_place(row, 16 * step + 2 * pair).word];
        word = (word & ~mask) | made;
      }
    }
  }
}

int nibble_of(const uint8_t* block, int row, int k) {
  const NibblePlace at = nibble_place(row, k);
  return static_cast<int>(reinterpret_cast<const uint32_t*>(block)[at.word] >> at.shift & 15);
}

float float_of(DType dtype, uint16_t bits) {
  return dtype == DType::kF16 ? to_float(fp16{bits}) : to_float(bf16{bits});
}

uint16_t bits_of(DType dtype, float value) {
  return dtype == DType::kF16 ? from_float<fp16>(value).bits : from_float<bf16>(value).bits;
}

float scale_of(const PackedWeight& w, const uint8_t* block, int row) {
  return float_of(w.layout.scale_dtype, reinterpret_cast<const uint16_t*>(block + kScalesAt)[row]);
}

int zero_of(const PackedWeight& w, const uint8_t* block, int row) {
  return w.layout.zero_points ? block[zeros_at(w.layout) + row] : 8;
}

// ---- int4_pack

uint32_t nibble(const Tensor& words, int64_t word, int64_t i) {
  return words.as<uint32_t>()[word] >> (4 * i) & 15;
}

constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // place of the nibble of column n % 8

// q of the part at row n and column k.
template <Int4Format kFormat>
uint32_t stored_q(const Int4PackParams& p, int64_t n, int64_t k) {
  switch (kFormat) {
    case Int4Format::kGptq:
    case Int4Format::kGptqV2:
      return nibble(p.q, k / 8 * p.n + n, k % 8);
    case Int4Format::kAwq:
      return nibble(p.q, k * (p.n / 8) + n / 8, kAwqPlace[n % 8]);
    case Int4Format::kCompressed:
      return nibble(p.q, n * p.q.size(1) + k / 8, k % 8);
    case Int4Format::kMarlin: {
      const int64_t lane = k / 2 % 4 + 4 * (n % 8);
      const int64_t i = k / 8 % 2 + 2 * (n / 8 % 2) + 4 * (k % 2);
      return nibble(p.q, k / 16 * (2 * p.n) + n / 64 * 128 + 4 * lane + n / 16 % 4, i);
    }
  }
  return 8;
}

// Reads rows [begin, end) of a block from row n and column k of the part. Beyond the part q is 8.
template <Int4Format kFormat>
void read_q(const Int4PackParams& p, int64_t n, int64_t k, int begin, int end, BlockQ& q) {
  const int64_t num_k = std::min<int64_t>(kPackedK, p.k - k);
  const int num_rows =
      static_cast<int>(std::min<int64_t>(end - begin, std::max<int64_t>(0, p.n - n)));
  for (int row = begin; row < end; ++row) {
    const bool inside = row - begin < num_rows;
    for (int i = inside ? static_cast<int>(num_k) : 0; i < kPackedK; ++i) q[row][i] = 8;
  }
  for (int64_t i = 0; i < num_k; ++i) {
    for (int row = 0; row < num_rows; ++row) {
      q[begin + row][i] = static_cast<uint8_t>(stored_q<kFormat>(p, n + row, k + i));
    }
  }
}

uint16_t stored_scale(const Int4PackParams& p, int64_t n, int64_t group) {
  const uint16_t* scales = p.scales.as<uint16_t>();
  if (p.format == Int4Format::kCompressed) return scales[n * p.scales.size(1) + group];
  if (p.format == Int4Format::kMarlin) {
    const int64_t in32 = n % 32, in64 = n % 64;
    n = p.scales.size(0) == 1 && p.k > kPackedK
            ? n - in32 + 8 * (in32 / 2 % 4) + 2 * (in32 / 8) + in32 % 2
            : n - in64 + 8 * (in64 % 8) + in64 / 8;
  }
  return scales[group * p.n + n];
}

uint8_t stored_zero(const Int4PackParams& p, int64_t n, int64_t group) {
  switch (p.format) {
    case Int4Format::kGptq:
      return (nibble(p.zeros, group * (p.n / 8) + n / 8, n % 8) + 1) & 15;
    case Int4Format::kGptqV2:
      return nibble(p.zeros, group * (p.n / 8) + n / 8, n % 8);
    case Int4Format::kAwq:
      return nibble(p.zeros, group * (p.n / 8) + n / 8, kAwqPlace[n % 8]);
    default:
      return nibble(p.zeros, n / 8 * p.zeros.size(1) + group, n % 8);
  }
}

// ---- packed_gemm

template <typename T, typename Y>
void multiply(const PackedGemmParams& p) {
  const PackedWeight& w = p.w;
  const int64_t m = p.x.size(0), k_blocks = w.k_blocks() / w.layout.planes;
  thread_local std::vector<float> buffer, fragment_buffer, sum_buffer;
  const float* x = as_floats(p.x.as<T>(), m * w.k, buffer);
  // [M][block][fragments], and the sum of x over each block, for zero points.
  fragment_buffer.resize(static_cast<size_t>(m * k_blocks * kFragmentFloats));
  sum_buffer.resize(static_cast<size_t>(m * k_blocks));
  float* fragments = fragment_buffer.data();
  float* sums = sum_buffer.data();
  for (int64_t i = 0; i < m * k_blocks; ++i) {
    const float* from = x + i / k_blocks * w.k + i % k_blocks * kPackedK;
    const int64_t count = std::min<int64_t>(kPackedK, w.k - i % k_blocks * kPackedK);
    strip_fragments(from, count, fragments + i * kFragmentFloats);
    sums[i] = 0;
    for (int64_t j = 0; j < count; ++j) sums[i] += from[j];
  }
  const int64_t stride = k_blocks * kFragmentFloats;
  const int64_t strips = (w.n + kStripRows - 1) / kStripRows;
  Y* y = p.y.as<Y>();
#pragma omp parallel for collapse(2) if (m * w.n * w.k > 65536)
  for (int64_t row_begin = 0; row_begin < m; row_begin += kMaxRows) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t rows = std::min(kMaxRows, m - row_begin);
      // The strip's first row in the weight block.
      const int first = static_cast<int>(strip % 8) * kStripRows;
      thread_local std::vector<float> totals, corrections;
      totals.assign(static_cast<size_t>(rows * kStripSums), 0);
      corrections.assign(static_cast<size_t>(rows * kStripRows), 0);
      for (int64_t kb = 0; kb < w.k_blocks(); ++kb) {
        const uint8_t* block = block_of(w, strip / 8, kb);
        float scales[kStripRows];
        for (int i = 0; i < kStripRows; ++i) scales[i] = scale_of(w, block, first + i);
        const int64_t at = row_begin * k_blocks + kb % k_blocks;
        add_int4_strip(reinterpret_cast<const uint32_t*>(block) + 16 * first, scales,
                       fragments + at * kFragmentFloats, stride, rows, totals.data());
        if (!w.layout.zero_points) continue;
        for (int64_t row = 0; row < rows; ++row) {
          const float sum = sums[at + row * k_blocks];
          for (int i = 0; i < kStripRows; ++i) {
            const int shift = 8 - zero_of(w, block, first + i);
            if (shift != 0) {
              corrections[row * kStripRows + i] += scales[i] * static_cast<float>(shift) * sum;
            }
          }
        }
      }
      const int64_t column = strip * kStripRows;
      for (int64_t row = 0; row < rows; ++row) {
        const auto sum_of = [&](int i) {
          return strip_row(totals.data() + row * kStripSums, i) + corrections[row * kStripRows + i];
        };
        const int count = static_cast<int>(std::min<int64_t>(kStripRows, w.n - column));
        if (w.gated) {
          Y* out = y + (row_begin + row) * (w.n / 2) + column / 2;
          for (int i = 0; i < count / 2; ++i) {
            const float gate = sum_of(i / 8 * 16 + i % 8), up = sum_of(i / 8 * 16 + i % 8 + 8);
            out[i] = from_float<Y>(gate / (1 + std::exp(-gate)) * up);
          }
          continue;
        }
        Y* out = y + (row_begin + row) * w.n + column;
        for (int i = 0; i < count; ++i) {
          const float sum = p.alpha * sum_of(i);
          out[i] = from_float<Y>(p.beta == 0 ? sum : sum + p.beta * to_float(out[i]));
        }
      }
    }
  }
}

}  // namespace

void int4_pack(const Context&, const Int4PackParams& p) {
  check_int4_pack(p);
  const PackedWeight& w = p.w;
  const int64_t groups = p.scales.size(p.format == Int4Format::kCompressed ? 1 : 0);
  const int64_t end_row =
      p.first_row + p.n == w.n ? w.row_blocks() * kPackedRows : p.first_row + p.n;
  const int64_t first_block = w.gated ? 0 : p.first_row / kPackedRows;
  const int64_t end_block = w.gated ? w.row_blocks() : (end_row + kPackedRows - 1) / kPackedRows;
  const int64_t first_k_block = p.first_k / kPackedK;
  const int64_t end_k_block = (p.first_k + p.k + kPackedK - 1) / kPackedK;
  void (*read)(const Int4PackParams&, int64_t, int64_t, int, int, BlockQ&) = nullptr;
  dispatch_int<0, 1, 2, 3, 4>("int4_pack: format", static_cast<int>(p.format), [&](auto format) {
    read = read_q<static_cast<Int4Format>(decltype(format)::value)>;
  });
#pragma omp parallel for collapse(2)
  for (int64_t row_block = first_block; row_block < end_block; ++row_block) {
    for (int64_t k_block = first_k_block; k_block < end_k_block; ++k_block) {
      uint8_t* block = block_of(w, row_block, k_block);
      const int64_t first_row = row_block * kPackedRows;
      const int64_t k = (k_block - first_k_block) * kPackedK;
      // Packs rows [begin, end) of the block from the part's rows n, n + 1, ….
      const auto pack_rows = [&](int begin, int end, int64_t n) {
        for (int row = begin; row < end; ++row) {
          const int64_t own = n + row - begin;
          for (int i = 0; i < w.layout.groups(); ++i) {
            const int64_t first_of_group = k + i * (kPackedK / w.layout.groups());
            const bool inside = own < p.n && first_of_group < p.k;
            const int64_t group = groups == 1 ? 0 : first_of_group / p.k_per_scale;
            const int at = row * w.layout.groups() + i;
            reinterpret_cast<uint16_t*>(block + kScalesAt)[at] =
                inside ? stored_scale(p, own, group) : uint16_t{0};
            if (!w.layout.zero_points) continue;
            block[zeros_at(w.layout) + at] = inside ? stored_zero(p, own, group) : 8;
          }
        }
        thread_local BlockQ q;
        read(p, n, k, begin, end, q);
        write_q(block, q, begin, end);
      };
      if (w.gated) {
        for (int row = 0; row < kPackedRows; row += 8) {
          const int64_t source = gated_row(w.n, first_row + row);
          if (source >= p.first_row && source < end_row) {
            pack_rows(row, row + 8, source - p.first_row);
          }
        }
        continue;
      }
      const int begin = static_cast<int>(std::max(p.first_row - first_row, int64_t{0}));
      const int end = static_cast<int>(std::min<int64_t>(end_row - first_row, kPackedRows));
      pack_rows(begin, end, first_row + begin - p.first_row);
    }
  }
}

void packed_quantize(const Context&, const PackedQuantizeParams& p) {
  check_packed_quantize(p);
  const PackedWeight& w = p.w;
  const int64_t k_blocks = w.k_blocks() / w.layout.planes;
  const int most = w.layout.planes == 1 ? 7 : 119;
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    const auto* x = p.x.as<decltype(t)>();
#pragma omp parallel for collapse(2)
    for (int64_t row_block = 0; row_block < w.row_blocks(); ++row_block) {
      for (int64_t k_block = 0; k_block < k_blocks; ++k_block) {
        uint8_t* high = block_of(w, row_block, k_block);  // upper nibble plane, or the only plane
        uint8_t* low = block_of(w, row_block, k_block + (w.layout.planes - 1) * k_blocks);
        thread_local BlockQ high_q, low_q;
        const int64_t first_k = k_block * kPackedK;
        const int64_t count = std::min<int64_t>(kPackedK, w.k - first_k);
        for (int row = 0; row < kPackedRows; ++row) {
          const int64_t n = row_block * kPackedRows + row;
          float values[kPackedK] = {}, largest = 0;
          if (n < w.n) {
            const int64_t source = p.index != nullptr ? p.index[n]
                                   : w.gated          ? gated_row(w.n, n)
                                                      : n;
            const auto* from = x + source * w.k + first_k;
            for (int64_t i = 0; i < count; ++i) values[i] = to_float(from[i]);
            for (float value : values) largest = std::max(largest, std::abs(value));
          }
          const uint16_t bits = bits_of(w.layout.scale_dtype, largest / static_cast<float>(most));
          const float scale = float_of(w.layout.scale_dtype, bits);
          reinterpret_cast<uint16_t*>(low + kScalesAt)[row] = bits;
          if (w.layout.planes == 2) {
            reinterpret_cast<uint16_t*>(high + kScalesAt)[row] =
                bits_of(w.layout.scale_dtype, 16 * scale);
          }
          for (int i = 0; i < kPackedK; ++i) {
            const float level = scale == 0 ? 0 : std::nearbyint(values[i] / scale);
            const int q = std::clamp(static_cast<int>(level), -most, most);
            const int biased = w.layout.planes == 1 ? q + 8 : q + 136;  // q = 16 (h - 8) + l - 8
            high_q[row][i] = static_cast<uint8_t>(biased / 16);
            low_q[row][i] = static_cast<uint8_t>(biased % 16);
          }
        }
        if (w.layout.planes == 2) write_q(high, high_q, 0, kPackedRows);
        write_q(low, low_q, 0, kPackedRows);
      }
    }
  });
}

void packed_dequantize(const Context&, const PackedDequantizeParams& p) {
  check_packed_dequantize(p);
  if (p.w.layout.codes != Codes::kInt4 || p.w.layout.group > 0) {
    return packed_dequantize_decoded(p);
  }
  const PackedWeight& w = p.w;
  const int64_t k_blocks = w.k_blocks() / w.layout.planes;
  dispatch_host_dtype(p.out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* out = p.out.as<T>();
#pragma omp parallel for
    for (int64_t i = 0; i < p.out.size(0); ++i) {
      const int64_t n = p.first_row + i;
      const int row = static_cast<int>(n % kPackedRows);
      for (int64_t k = 0; k < w.k; ++k) {
        const int in_block = static_cast<int>(k % kPackedK);
        const uint8_t* high = block_of(w, n / kPackedRows, k / kPackedK);
        int q = nibble_of(high, row, in_block) - zero_of(w, high, row);
        float scale = scale_of(w, high, row);
        if (w.layout.planes == 2) {
          const uint8_t* low = block_of(w, n / kPackedRows, k / kPackedK + k_blocks);
          q = 16 * q + nibble_of(low, row, in_block) - zero_of(w, low, row);
          scale = scale_of(w, low, row);
        }
        out[i * w.k + k] = from_float<T>(static_cast<float>(q) * scale);
      }
    }
  });
}

void packed_gemm(const Context&, const PackedGemmParams& p) {
  check_packed_gemm(p);
  if (p.w.layout.codes != Codes::kInt4 || p.w.layout.group > 0) return packed_gemm_decoded(p);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    p.y.dtype() == DType::kF32 ? multiply<T, float>(p) : multiply<T, T>(p);
  });
}

}  // namespace cpmcu::cpu
