// Group scales of weight blocks (layout.h): bytes with five bits of exponent and three of mantissa.
//
// Checkpoints have two kinds of group scales. An e4m3 scale becomes such a byte exactly. If scales
// are powers of two (e8m0), the byte holds the ratio of a scale to the largest scale of 8 rows x
// 128 k. The largest scale goes into the float32 scale of these rows.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/gemm/packed/layout.h"
#include "kernels/layer/fp8_row.h"

namespace cpmcu {

// Exponent field of the byte that stands for the largest scale of 8 rows x 128 k.
constexpr int kTopExponent = 30;

// A power of two at most 2^most_exponents below the largest one is exact in float16 times any code.
// Smaller ones become 0: their part of a sum is below the precision of float32 (e4m3: a quarter
// above it).
constexpr int most_exponents(Codes codes) { return codes == Codes::kE2m1 ? 24 : 22; }

CPMCU_HOST_DEVICE inline uint8_t group_scale_of_e4m3(uint8_t code) {
  const uint32_t bits = std::bit_cast<uint32_t>(from_e4m3(code & 0x7F));
  return bits == 0 ? 0 : static_cast<uint8_t>((bits >> 20) - 8 * (127 - 15));
}

// `exponent`, `largest`: bytes of e8m0, 2^(byte - 127).
CPMCU_HOST_DEVICE inline uint8_t group_scale_of_e8m0(int exponent, int largest, int most) {
  const int below = largest - exponent;
  return static_cast<uint8_t>(below > most ? 0 : 8 * (kTopExponent - below));
}

// The float32 scale beside group_scale_of_e8m0. The byte 255, NaN in e8m0, gives infinity.
CPMCU_HOST_DEVICE inline float scale_of_e8m0(int largest) {
  const float power = largest == 0 ? 0x1p-127f : std::bit_cast<float>(uint32_t(largest) << 23);
  return power * 0x1p-15f;  // 2^(15 - kTopExponent)
}

CPMCU_HOST_DEVICE inline float group_scale_value(uint8_t byte) {
  return byte == 0 ? 0 : std::bit_cast<float>((uint32_t{byte} + 8 * (127 - 15)) << 20);
}

}  // namespace cpmcu
