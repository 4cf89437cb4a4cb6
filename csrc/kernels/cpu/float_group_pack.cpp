#include "kernels/gemm/packed/float_group_pack.h"

#include <algorithm>
#include <array>

#include "kernels/gemm/packed/group_scale.h"

namespace cpmcu::cpu {
namespace {

constexpr int kSharedRows = 8;  // rows of W that share a float32 scale

// Rows of a part that are stored as eight rows of a block; -1: padding.
using Rows = std::array<int64_t, kSharedRows>;

// Writes the codes of a row. If a group's scale is 0, its codes become 0.
void write_codes(const FloatGroupPackParams& p, uint8_t* block, int row, int64_t own, int64_t k0,
                 const uint8_t* group_scales) {
  const PackedLayout& layout = p.w.layout;
  const auto* codes = p.codes.as<uint8_t>();
  for (int i = 0; i < kPackedK; ++i) {
    const int64_t k = k0 + i, at = own * p.w.k + k;
    const bool is_zero = own < 0 || k >= p.w.k || group_scales[i / layout.group] == 0;
    if (layout.bits() == 8) {
      block[byte_place(row, i)] = is_zero ? uint8_t{0} : codes[at];
      continue;
    }
    const uint32_t code = is_zero ? 0 : codes[at / 2] >> (4 * (at % 2)) & 15;
    const NibblePlace place = nibble_place(row, i);
    uint32_t& word = reinterpret_cast<uint32_t*>(block)[place.word];
    word = (word & ~(15u << place.shift)) | code << place.shift;
  }
}

void pack_rows(const FloatGroupPackParams& p, uint8_t* block, int row, const Rows& rows, int64_t k0,
               float factor) {
  const PackedLayout& layout = p.w.layout;
  const int groups = kPackedK / layout.group;
  const int64_t first_group = k0 / layout.group, all_groups = p.scales.size(1);
  const auto* scales = p.scales.as<uint8_t>();
  const auto stored = [&](int64_t own, int i) -> int {  // padding has scale 0
    return own >= 0 && first_group + i < all_groups ? scales[own * all_groups + first_group + i]
                                                    : 0;
  };
  int largest = 0;
  for (int64_t own : rows) {
    for (int i = 0; i < groups; ++i) largest = std::max(largest, stored(own, i));
  }
  auto* scale = reinterpret_cast<float*>(block + layout.code_bytes()) + row / kSharedRows;
  *scale = rows[0] < 0 ? 0 : factor * (p.powers ? scale_of_e8m0(largest) : 1);
  uint8_t* group_scales = block + layout.code_bytes() + 4 * kPackedRows / kSharedRows;
  const int most = most_exponents(layout.codes);
  for (int j = 0; j < kSharedRows; ++j) {
    uint8_t* its = group_scales + (row + j) * groups;
    for (int i = 0; i < groups; ++i) {
      const int byte = stored(rows[static_cast<size_t>(j)], i);
      its[i] = p.powers ? group_scale_of_e8m0(byte, largest, most)
                        : group_scale_of_e4m3(static_cast<uint8_t>(byte));
    }
    write_codes(p, block, row + j, rows[static_cast<size_t>(j)], k0, its);
  }
}

}  // namespace

void float_group_pack(const Context&, const FloatGroupPackParams& p) {
  check_float_group_pack(p);
  const PackedWeight& w = p.w;
  const int64_t n = p.codes.size(0);
  const int64_t end_row = p.first_row + n == w.n ? w.row_blocks() * kPackedRows : p.first_row + n;
  float factor = p.factor.empty() ? 1 : *p.factor.as<float>();
  if (p.divides) factor = 1 / factor;
#pragma omp parallel for
  for (int64_t row_block = 0; row_block < w.row_blocks(); ++row_block) {
    for (int row = 0; row < kPackedRows; row += kSharedRows) {
      const int64_t stored = row_block * kPackedRows + row;
      const int64_t first = w.gated ? gated_row(w.n, stored) : stored;
      if (first < p.first_row || first >= end_row) continue;
      Rows rows;
      for (int64_t j = 0; j < kSharedRows; ++j) {
        const bool inside = first + j < p.first_row + n;
        rows[static_cast<size_t>(j)] =
            inside ? part_row(first + j, p.first_row, p.interleaved, w.n) : -1;
      }
      for (int64_t kb = 0; kb < w.k_blocks(); ++kb) {
        uint8_t* block =
            static_cast<uint8_t*>(w.blocks) + (row_block * w.k_blocks() + kb) * w.block_bytes();
        pack_rows(p, block, row, rows, kb * kPackedK, factor);
      }
    }
  }
}

}  // namespace cpmcu::cpu
