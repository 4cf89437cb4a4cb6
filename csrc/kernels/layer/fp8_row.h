// Rows of an fp8 KV cache: the D numbers of one token and KV head as e4m3, and a float32 scale in
// another plane of the same page.
//
//   scale = max |x| / 448,  code = e4m3(x / scale),  x' = scale * code
//
// In each group of 16 numbers, c and c + 8 are adjacent (fp8_place). A word of four bytes
// then holds two pairs of operand B of mma.m16n8k16: its even bytes and its odd bytes.
#pragma once

#include <bit>
#include <cstdint>

namespace cpmcu {

#ifdef __CUDACC__
#define CPMCU_HOST_DEVICE __host__ __device__
#else
#define CPMCU_HOST_DEVICE
#endif

constexpr float kMaxE4m3 = 448;

// Rounds to the nearest e4m3 number, ties to even. Larger magnitudes and NaN become 448.
CPMCU_HOST_DEVICE inline uint8_t to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, which the sum rounds to
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  } else {
    const uint32_t rebased = (magnitude < 0x43e00000u ? magnitude : 0x43e00000u) - 0x3c000000u;
    code = (rebased + 0x7ffffu + ((rebased >> 20) & 1)) >> 20;
  }
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
}

// The value of a code that to_e4m3 gives.
CPMCU_HOST_DEVICE inline float from_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  // Multiplying by 2^120 re-biases the exponent. It is also correct for subnormals.
  const float magnitude = std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// The bits of |x|. Their maximum as integers is the maximum of the magnitudes, or NaN if one is.
CPMCU_HOST_DEVICE inline uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

struct Fp8Scale {
  float scale;    // factor of the row's codes
  float inverse;  // factor of the row's numbers before to_e4m3

  // `bits`: the maximum of magnitude_bits of the row. Numbers below 2^-100 become 0.
  CPMCU_HOST_DEVICE explicit Fp8Scale(uint32_t bits) {
    const float max = std::bit_cast<float>(bits);
    const bool is_tiny = max < 0x1p-100f;
    scale = is_tiny ? 0.0f : max / kMaxE4m3;
    inverse = is_tiny ? 0.0f : kMaxE4m3 / max;
  }
};

// The byte of a row that holds number i.
CPMCU_HOST_DEVICE constexpr int fp8_place(int i) { return i / 16 * 16 + i % 8 * 2 + i / 8 % 2; }

}  // namespace cpmcu
