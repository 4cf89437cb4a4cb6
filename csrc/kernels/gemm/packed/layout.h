// The layouts of weight blocks: what a block holds for 256 rows x 128 k, and how a number is made.
//
//   codes    numbers                               after the codes
//   kInt4    (q - z) * scale, z = 8 without zeros  scales [256], 16 bits; zeros [256], 8 bits
//   kInt8    (q - 128) * scale                     scales [256][4], 16 bits
//   kE4m3    e4m3(q) * scale                       scales [256 / scale_rows], float32
//   kE2m1    e2m1(q) * group scale * scale         scales [32], float32; group scales
//   kK4      d s q - e m                           records [256]; of minima [256]
//   kK8      d s (q - 128) - e m                   the same; without a minimum, records only
//   kOther   as `decode` computes them: a layout of a plugin, on the CPU only
//
// int4 with two planes has 8 bits: the first K columns hold the high nibbles with 16 times the
// scale, the others the low nibbles. w = (16 (h - 8) + (l - 8)) * scale covers [-136, 119].
//
// int4 with `group` 32 has scales [256][4], and zeros [256][4]: one for 32 k of a row, as kInt8
// has; with `group` 16 there are 8 of each. A number times such a scale is not exact in 16 bits, so
// kernels scale the sums of 32 or 16 k.
//
// Group scales of floats: bytes [256][128 / group], one for `group` k of a row. Byte b is the
// number 2^(b / 8 - 15) (1 + b % 8 / 8), and 0 is 0: the upper bits of a float16. If a group scale
// is 0, the codes of its group are 0. A code times a group scale is exact in 16 bits. kE4m3 may
// have group scales too.
//
// K-quants of llama.cpp have scales of two levels. The record of a row has d, float16, and a byte s
// for each group of k. A group has 32 k in kK4, and 16 in kK8, where s is signed. A record of
// minima has e and the bytes m likewise. d s and e m are exact in float32.
//
// With `halves`, rows may have scales (and minima) that are float16 numbers, one for 32 k. Every
// record of kK4 then holds four of them. A record of kK8 holds four after the half kHalvesTag, and
// other records are as above.
//
// To add a layout to the CUDA kernels, add a value of Codes, its unpacker (unpack.cuh says what it
// needs), and a line in dispatch_unpacker.
#pragma once

#include "core/dtype.h"

namespace cpmcu {

constexpr int kPackedRows = 256;  // rows of W in a weight block
constexpr int kPackedK = 128;
constexpr uint16_t kHalvesTag = 0x7FFF;  // a NaN, which d never is

enum class Codes : uint8_t { kInt4, kInt8, kE4m3, kE2m1, kK4, kK8, kOther };

struct PackedLayout {
  // Writes the 128 numbers of a row of a block; returns the factor of their sums.
  using Decode = float (*)(const PackedLayout& layout, const uint8_t* block, int row, float* to);

  Codes codes = Codes::kInt4;
  int planes = 1;
  bool zero_points = false;         // only for kInt4 and kInt8
  bool minimum = false;             // true for kK4; either for kK8
  bool halves = false;              // only for kK4 and kK8
  DType scale_dtype = DType::kF16;  // only for kInt4 and kInt8: kF16 or kBF16
  int scale_rows = 1;               // only for kE4m3: rows of a block that share a scale, 1 or 8
  int group = 0;  // k that share a scale: 0 (128) or 32; also 16 for kInt4, kE2m1 and kK8
  int64_t other_block_bytes = 0;  // only for kOther
  Decode decode = nullptr;        // only for kOther

  int bits() const {
    return codes == Codes::kInt4 || codes == Codes::kE2m1 || codes == Codes::kK4 ? 4 : 8;
  }
  int64_t code_bytes() const { return kPackedRows * kPackedK * bits() / 8; }
  int groups() const { return group == 0 ? 1 : kPackedK / group; }  // groups in a row of a block
  int record_bytes() const {                                        // only for kK4 and kK8
    return codes == Codes::kK4 && halves ? 2 * groups() : 2 + groups();
  }
  int64_t block_bytes() const {
    switch (codes) {
      case Codes::kInt4:
      case Codes::kInt8:
        return code_bytes() + (zero_points ? 3 : 2) * kPackedRows * groups();
      case Codes::kE4m3:
      case Codes::kE2m1:
        return code_bytes() + 4 * kPackedRows / scale_rows +
               (group == 0 ? 0 : kPackedRows * groups());
      case Codes::kK4:
      case Codes::kK8:
        return code_bytes() + (minimum ? 2 : 1) * kPackedRows * record_bytes();
      case Codes::kOther:
        break;
    }
    return other_block_bytes;
  }
  // Whether one launch can read weight blocks of both layouts.
  bool unpacks_like(const PackedLayout& other) const {
    return codes == other.codes && planes == other.planes && zero_points == other.zero_points &&
           minimum == other.minimum && group == other.group;
  }
};

// The place of the 4-bit code of (row, k) in a weight block: bits [shift, shift + 4) of the
// little-endian 32-bit word `word`. A warp owns 32 rows. The 16 bytes of a lane are the A fragments
// of mma.m16n8k16 of two m16 tiles and two k steps of 16.
struct NibblePlace {
  int word;
  int shift;
};
constexpr NibblePlace nibble_place(int row, int k) {
  const int warp = row / 32, tile = row / 16 % 2, row_half = row / 8 % 2, g = row % 8;
  const int step = k / 16, k_half = k / 8 % 2, q = k / 2 % 4, odd = k % 2;
  const int lane = 4 * g + q, reg = row_half + 2 * k_half;
  return {512 * warp + 128 * (step / 2) + 4 * lane + 2 * (step % 2) + tile, 4 * (reg + 4 * odd)};
}

// The byte of the 8-bit code of (row, k). The 16 bytes of a lane are the fragments of two m16 tiles
// of one k step. The bytes of the second 8 k come first, so that those of the first 8 are the upper
// bytes of 16-bit halves.
constexpr int byte_place(int row, int k) {
  const int warp = row / 32, tile = row / 16 % 2, row_half = row / 8 % 2, g = row % 8;
  const int step = k / 16, k_half = k / 8 % 2, q = k / 2 % 4, odd = k % 2;
  return 4096 * warp + 512 * step + 16 * (4 * g + q) + 8 * tile + 4 * row_half + 2 * odd + 1 -
         k_half;
}

}  // namespace cpmcu
