#include "kernels/gemm/packed/int8_pack.h"

namespace cpmcu::cpu {

void int8_pack(const Context&, const Int8PackParams& p) {
  check_int8_pack(p);
  const PackedWeight& w = p.w;
  constexpr uint8_t kZero = 128;
  const bool words = p.codes.dtype() == DType::kI32, is_signed = p.codes.dtype() == DType::kI8;
  const int64_t n = p.codes.size(words ? 1 : 0), groups = p.scales.size(words ? 0 : 1);
  const bool one_scale = !words && p.scales.size(0) == 1;
  const int64_t end_row = p.first_row + n == w.n ? w.row_blocks() * kPackedRows : p.first_row + n;
  const auto* codes = p.codes.as<uint8_t>();
  const auto* scales = p.scales.as<uint16_t>();
  const auto code_of = [&](int64_t own, int64_t k) -> uint8_t {
    if (own >= n || k >= w.k) return kZero;
    const uint8_t code = codes[words ? (k / 4 * n + own) * 4 + k % 4 : own * w.k + k];
    return is_signed ? code ^ kZero : code;
  };
  const auto scale_of = [&](int64_t own, int64_t k) -> uint16_t {
    if (own >= n || k >= w.k) return 0;
    const int64_t group = k / p.k_per_scale, row = one_scale ? 0 : own;
    return scales[words ? group * n + row : row * groups + group];
  };
  // Zero points have the order of the scales. In other formats than GPTQ's, a word holds four rows.
  const uint8_t* stored_zeros = w.layout.zero_points ? p.zeros.as<uint8_t>() : nullptr;
  const auto zero_of = [&](int64_t own, int64_t k) -> uint8_t {
    if (own >= n || k >= w.k) return kZero;
    const int64_t group = k / p.k_per_scale;
    const int64_t at = words ? group * n + own : (own / 4 * groups + group) * 4 + own % 4;
    return static_cast<uint8_t>(stored_zeros[at] + p.zero_offset);
  };
#pragma omp parallel for
  for (int64_t row = 0; row < w.row_blocks() * kPackedRows; ++row) {
    const int64_t source = w.gated ? gated_row(w.n, row) : row, own = source - p.first_row;
    if (source < p.first_row || source >= end_row) continue;
    const int in_block = static_cast<int>(row % kPackedRows);
    for (int64_t kb = 0; kb < w.k_blocks(); ++kb) {
      uint8_t* block = static_cast<uint8_t*>(w.blocks) +
                       (row / kPackedRows * w.k_blocks() + kb) * w.block_bytes();
      for (int i = 0; i < kPackedK; ++i) {
        block[byte_place(in_block, i)] = code_of(own, kb * kPackedK + i);
      }
      auto* its =
          reinterpret_cast<uint16_t*>(block + w.layout.code_bytes()) + in_block * w.layout.groups();
      for (int i = 0; i < w.layout.groups(); ++i) {
        its[i] = scale_of(own, kb * kPackedK + i * w.layout.group);
      }
      if (stored_zeros == nullptr) continue;
      uint8_t* zeros = block + w.layout.code_bytes() + 2 * kPackedRows * w.layout.groups();
      for (int i = 0; i < w.layout.groups(); ++i) {
        zeros[in_block * w.layout.groups() + i] = zero_of(own, kb * kPackedK + i * w.layout.group);
      }
    }
  }
}

}  // namespace cpmcu::cpu
