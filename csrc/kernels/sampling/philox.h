// Philox-4x32-10: four random 32-bit words from a counter and a key. Host and device results are
// equal.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CPMCU_HOST_DEVICE __host__ __device__
#else
#define CPMCU_HOST_DEVICE
#endif

namespace cpmcu {

struct Philox4 {
  uint32_t words[4];
};

CPMCU_HOST_DEVICE inline Philox4 philox(Philox4 counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = counter.words[0], c1 = counter.words[1];
  uint32_t c2 = counter.words[2], c3 = counter.words[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [2^-24, 1 - 2^-24]: the centre of one of 2^23 equal intervals. With 24 bits, the last
// centre would round to 1 in float32, and its Gumbel value would be infinite.
CPMCU_HOST_DEVICE inline float uniform_from(uint32_t word) {
  return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
}

// The random words of tokens 4 i .. 4 i + 3 at `position`, i = token / 4.
CPMCU_HOST_DEVICE inline Philox4 sampling_words(uint64_t seed, uint32_t stream, int position,
                                                int token) {
  return philox({{static_cast<uint32_t>(token) / 4, static_cast<uint32_t>(position), stream, 0}},
                seed);
}

}  // namespace cpmcu

#undef CPMCU_HOST_DEVICE
