// Decodes each strip of 32 rows of W once per block of 128 k and multiplies it with all rows of x.
#include "kernels/cpu/packed_decoded.h"

#include <array>
#include <cmath>
#include <vector>

#include "kernels/cpu/simd.h"
#include "kernels/gemm/packed/code8_pack.h"
#include "kernels/gemm/packed/group_scale.h"
#include "kernels/layer/fp8_row.h"

namespace cpmcu::cpu {
namespace {

uint8_t* block_of(const PackedWeight& w, int64_t row_block, int64_t k_block) {
  return static_cast<uint8_t*>(w.blocks) + (row_block * w.k_blocks() + k_block) * w.block_bytes();
}

float* scales_of(const PackedLayout& layout, uint8_t* block) {
  return reinterpret_cast<float*>(block + layout.code_bytes());
}

// The 128 codes of a row of a block. They lie at nibble_place or byte_place. Calling these
// functions for each code would spend most of the time on divisions.
struct RowCodes {
  uint8_t at[kPackedK];

  RowCodes(const PackedLayout& layout, const uint8_t* block, int row) {
    if (layout.bits() == 4) {
      const auto* words =
          reinterpret_cast<const uint32_t*>(block) + row / 32 * 512 + row % 8 * 16 + row / 16 % 2;
      const int shift = 4 * (row / 8 % 2);
      for (int step = 0; step < 8; ++step) {
        for (int q = 0; q < 4; ++q) {
          const uint32_t word = words[step / 2 * 128 + step % 2 * 2 + 4 * q] >> shift;
          put(16 * step + 2 * q, word & 15, word >> 16 & 15, word >> 8 & 15, word >> 24 & 15);
        }
      }
      return;
    }
    const uint8_t* bytes =
        block + row / 32 * 4096 + row % 8 * 64 + row / 16 % 2 * 8 + row / 8 % 2 * 4;
    for (int step = 0; step < 8; ++step) {
      for (int q = 0; q < 4; ++q) {
        const uint8_t* of = bytes + 512 * step + 16 * q;
        put(16 * step + 2 * q, of[1], of[3], of[0], of[2]);
      }
    }
  }
  // Codes of k, k + 1, k + 8 and k + 9.
  void put(int k, uint32_t first, uint32_t odd, uint32_t eighth, uint32_t ninth) {
    at[k] = static_cast<uint8_t>(first), at[k + 1] = static_cast<uint8_t>(odd);
    at[k + 8] = static_cast<uint8_t>(eighth), at[k + 9] = static_cast<uint8_t>(ninth);
  }
};

// Multiplies the numbers of a row by its group scales.
void scale_groups(const PackedLayout& layout, const uint8_t* block, int row, float* numbers) {
  const uint8_t* scales = block + layout.code_bytes() + 4 * kPackedRows / layout.scale_rows;
  for (int group = 0; group < layout.groups(); ++group) {
    const float scale = group_scale_value(scales[row * layout.groups() + group]);
    float* from = numbers + group * layout.group;
    for (int k = 0; k < layout.group; ++k) from[k] *= scale;
  }
}

float scale_of_row(const PackedLayout& layout, const uint8_t* block, int row) {
  const auto* scales = reinterpret_cast<const float*>(block + layout.code_bytes());
  return scales[row / layout.scale_rows];
}

float decode_e2m1(const PackedLayout& layout, const uint8_t* block, int row, float* to) {
  static constexpr float kNumbers[16] = {0,    .5f,  1,  1.5f,  2,  3,  4,  6,
                                         -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  const RowCodes codes(layout, block, row);
  for (int k = 0; k < kPackedK; ++k) to[k] = kNumbers[codes.at[k]];
  scale_groups(layout, block, row, to);
  return scale_of_row(layout, block, row);
}

float decode_e4m3(const PackedLayout& layout, const uint8_t* block, int row, float* to) {
  static const auto numbers = [] {
    std::array<float, 256> made{};
    for (int code = 0; code < 256; ++code) made[code] = from_e4m3(static_cast<uint8_t>(code));
    return made;
  }();
  const RowCodes codes(layout, block, row);
  for (int k = 0; k < kPackedK; ++k) to[k] = numbers[codes.at[k]];
  if (layout.group > 0) scale_groups(layout, block, row, to);
  return scale_of_row(layout, block, row);
}

float scale_of_group(const PackedLayout& layout, const uint8_t* block, int at) {
  const uint16_t bits = reinterpret_cast<const uint16_t*>(block + layout.code_bytes())[at];
  return layout.scale_dtype == DType::kF16 ? to_float(fp16{bits}) : to_float(bf16{bits});
}

// An integer times the scale of its group is exact in float32.
float decode_integers(const PackedLayout& layout, const uint8_t* block, int row, float* to) {
  const uint8_t* zeros = block + layout.code_bytes() + 2 * kPackedRows * layout.groups();
  const RowCodes codes(layout, block, row);
  for (int group = 0; group < layout.groups(); ++group) {
    const int at = row * layout.groups() + group;
    const int zero = layout.zero_points ? zeros[at] : 1 << (layout.bits() - 1);
    const float scale = scale_of_group(layout, block, at);
    for (int k = group * layout.group; k < (group + 1) * layout.group; ++k) {
      to[k] = static_cast<float>(codes.at[k] - zero) * scale;
    }
  }
  return 1;
}

// d s and e m are exact in float32; the difference is rounded once, as in llama.cpp.
float decode_k_quant(const PackedLayout& layout, const uint8_t* block, int row, float* to) {
  const bool is_4 = layout.codes == Codes::kK4;
  const uint8_t* record = block + layout.code_bytes() + row * layout.record_bytes();
  const uint8_t* of_min = record + int64_t{kPackedRows} * layout.record_bytes();
  const auto half_at = [](const uint8_t* at) {
    return to_float(fp16{*reinterpret_cast<const uint16_t*>(at)});
  };
  const auto number_of = [&](const uint8_t* of, int group, bool is_signed) {
    if (layout.halves && is_4) return half_at(of + 2 * group);
    if (layout.halves && *reinterpret_cast<const uint16_t*>(of) == kHalvesTag) {
      return half_at(of + 2 + group / 2 * 2);
    }
    const int byte = of[2 + group];
    return half_at(of) * static_cast<float>(is_signed ? static_cast<int8_t>(byte) : byte);
  };
  const RowCodes codes(layout, block, row);
  for (int group = 0; group < layout.groups(); ++group) {
    const float s = number_of(record, group, !is_4);
    const float m = layout.minimum ? number_of(of_min, group, false) : 0;
    for (int k = group * layout.group; k < (group + 1) * layout.group; ++k) {
      const float number = s * static_cast<float>(codes.at[k] - (is_4 ? 0 : 128));
      to[k] = number - m;
    }
  }
  return 1;
}

PackedLayout::Decode decode_of(const PackedLayout& layout) {
  switch (layout.codes) {
    case Codes::kInt4:
    case Codes::kInt8:
      return decode_integers;
    case Codes::kE4m3:
      return decode_e4m3;
    case Codes::kE2m1:
      return decode_e2m1;
    case Codes::kK4:
    case Codes::kK8:
      return decode_k_quant;
    default:
      return layout.decode;
  }
}

template <typename T, typename Y>
void multiply(const PackedGemmParams& p) {
  const PackedWeight& w = p.w;
  const int64_t m = p.x.size(0), k_blocks = w.k_blocks();
  const auto decode = decode_of(w.layout);
  thread_local std::vector<float> buffer, x_buffer;
  const float* x = as_floats(p.x.as<T>(), m * w.k, buffer);
  x_buffer.assign(static_cast<size_t>(k_blocks * m * kPackedK), 0);  // [k block][M][128]
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < w.k; ++k) {
      x_buffer[(k / kPackedK * m + i) * kPackedK + k % kPackedK] = x[i * w.k + k];
    }
  }
  const float* blocks_of_x = x_buffer.data();
  const int64_t strips = (w.n + kStripRows - 1) / kStripRows;
  Y* y = p.y.as<Y>();
#pragma omp parallel for if (m * w.n * w.k > 65536)
  for (int64_t strip = 0; strip < strips; ++strip) {
    // The strip's first row in the weight block.
    const int first = static_cast<int>(strip % 8) * kStripRows;
    thread_local std::vector<float> totals, part;
    totals.assign(static_cast<size_t>(m * kStripRows), 0);
    part.resize(static_cast<size_t>(m * kStripRows));
    float rows[kStripRows * kPackedK], factors[kStripRows];
    for (int64_t kb = 0; kb < k_blocks; ++kb) {
      const uint8_t* block = block_of(w, strip / 8, kb);
      for (int i = 0; i < kStripRows; ++i) {
        factors[i] = decode(w.layout, block, first + i, rows + i * kPackedK);
      }
      dot_rows(blocks_of_x + kb * m * kPackedK, m, rows, kStripRows, kPackedK, part.data(),
               kStripRows);
      for (int64_t i = 0; i < m * kStripRows; ++i) totals[i] += factors[i % kStripRows] * part[i];
    }
    const int64_t column = strip * kStripRows;
    const int count = static_cast<int>(std::min<int64_t>(kStripRows, w.n - column));
    for (int64_t row = 0; row < m; ++row) {
      const float* sums = totals.data() + row * kStripRows;
      if (w.gated) {
        Y* out = y + row * (w.n / 2) + column / 2;
        for (int i = 0; i < count / 2; ++i) {
          const float gate = sums[i / 8 * 16 + i % 8], up = sums[i / 8 * 16 + i % 8 + 8];
          out[i] = from_float<Y>(gate / (1 + std::exp(-gate)) * up);
        }
        continue;
      }
      Y* out = y + row * w.n + column;
      for (int i = 0; i < count; ++i) {
        const float sum = p.alpha * sums[i];
        out[i] = from_float<Y>(p.beta == 0 ? sum : sum + p.beta * to_float(out[i]));
      }
    }
  }
}

}  // namespace

void packed_gemm_decoded(const PackedGemmParams& p) {
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    p.y.dtype() == DType::kF32 ? multiply<T, float>(p) : multiply<T, T>(p);
  });
}

void packed_dequantize_decoded(const PackedDequantizeParams& p) {
  const PackedWeight& w = p.w;
  const auto decode = decode_of(w.layout);
  dispatch_host_dtype(p.out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* out = p.out.as<T>();
#pragma omp parallel for
    for (int64_t i = 0; i < p.out.size(0); ++i) {
      const int64_t n = p.first_row + i;
      float numbers[kPackedK];
      for (int64_t k = 0; k < w.k; ++k) {
        thread_local float factor = 0;
        if (k % kPackedK == 0) {
          factor = decode(w.layout, block_of(w, n / kPackedRows, k / kPackedK),
                          static_cast<int>(n % kPackedRows), numbers);
        }
        out[i * w.k + k] = from_float<T>(numbers[k % kPackedK] * factor);
      }
    }
  });
}

void code8_pack(const Context&, const Code8PackParams& p) {
  check_code8_pack(p);
  const PackedWeight& w = p.w;
  const int64_t n = p.codes.size(0);
  const int64_t end_row = p.first_row + n == w.n ? w.row_blocks() * kPackedRows : p.first_row + n;
  const auto* codes = p.codes.as<uint8_t>();
#pragma omp parallel for
  for (int64_t row = 0; row < w.row_blocks() * kPackedRows; ++row) {
    const int64_t source = w.gated ? gated_row(w.n, row) : row;
    if (source < p.first_row || source >= end_row) continue;
    const int64_t own = source - p.first_row;
    const int in_block = static_cast<int>(row % kPackedRows);
    for (int64_t kb = 0; kb < w.k_blocks(); ++kb) {
      uint8_t* block = block_of(w, row / kPackedRows, kb);
      for (int i = 0; i < kPackedK; ++i) {
        const int64_t k = kb * kPackedK + i;
        block[byte_place(in_block, i)] = own < n && k < w.k ? codes[own * w.k + k] : uint8_t{0};
      }
      if (in_block % w.layout.scale_rows != 0) continue;
      const int64_t at = own / p.rows_per_scale * p.scales.size(1) + kb * kPackedK / p.k_per_scale;
      scales_of(w.layout, block)[in_block / w.layout.scale_rows] =
          own < n ? p.scales.as<float>()[at] : 0;
    }
  }
}

}  // namespace cpmcu::cpu
