#include "kernels/gemm/packed/k_quant_pack.h"

namespace cpmcu::cpu {
namespace {

// Writes a row's record of block `k_block`.
void write_record(const PackedLayout& layout, uint8_t* to, const Tensor& records, int64_t own,
                  int64_t k_block) {
  const int bytes = layout.record_bytes();
  const uint8_t* from = records.as<uint8_t>() + own * records.size(1) + k_block * bytes;
  for (int i = 0; i < bytes; ++i) to[i] = own >= 0 ? from[i] : uint8_t{0};
}

void write_codes(const KQuantPackParams& p, uint8_t* block, int row, int64_t own, int64_t k0) {
  const auto* codes = p.codes.as<uint8_t>();
  for (int i = 0; i < kPackedK; ++i) {
    const int64_t at = own * p.w.k + k0 + i;
    const bool inside = own >= 0 && k0 + i < p.w.k;
    if (p.w.layout.bits() == 8) {
      block[byte_place(row, i)] = inside ? codes[at] ^ 128 : 128;
      continue;
    }
    const uint32_t code = inside ? codes[at / 2] >> (4 * (at % 2)) & 15 : 0;
    const NibblePlace place = nibble_place(row, i);
    uint32_t& word = reinterpret_cast<uint32_t*>(block)[place.word];
    word = (word & ~(15u << place.shift)) | code << place.shift;
  }
}

}  // namespace

void k_quant_pack(const Context&, const KQuantPackParams& p) {
  check_k_quant_pack(p);
  const PackedWeight& w = p.w;
  const PackedLayout& layout = w.layout;
  const int64_t n = p.codes.size(0);
  const int64_t end_row = p.first_row + n == w.n ? w.row_blocks() * kPackedRows : p.first_row + n;
  // Words hold values of eight rows each, so a thread takes whole words: 16 rows of a block.
  constexpr int kRows = 16;
#pragma omp parallel for
  for (int64_t first = 0; first < w.row_blocks() * kPackedRows; first += kRows) {
    for (int64_t row = first; row < first + kRows; ++row) {
      const int64_t source = w.gated ? gated_row(w.n, row) : row;
      if (source < p.first_row || source >= end_row) continue;
      const int64_t own = source < p.first_row + n ? source - p.first_row : -1;
      const int in_block = static_cast<int>(row % kPackedRows);
      for (int64_t kb = 0; kb < w.k_blocks(); ++kb) {
        uint8_t* block = static_cast<uint8_t*>(w.blocks) +
                         (row / kPackedRows * w.k_blocks() + kb) * w.block_bytes();
        write_codes(p, block, in_block, own, kb * kPackedK);
        uint8_t* record = block + layout.code_bytes() + in_block * layout.record_bytes();
        write_record(layout, record, p.records, own, kb);
        if (!layout.minimum) continue;
        record += int64_t{kPackedRows} * layout.record_bytes();
        write_record(layout, record, p.min_records, own, kb);
      }
    }
  }
}

}  // namespace cpmcu::cpu
