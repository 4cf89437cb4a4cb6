// A number is NaN or infinite if all bits of its exponent are set. Then its magnitude bits, read as
// an integer, are at least those of infinity. So the loop needs one AND and one maximum for each
// vector. It is compiled for AVX2 and for the baseline.
#include "core/finite.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

// A resolver picks the clone before the sanitizers are ready, so sanitizer builds have no clones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CPMCU_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CPMCU_CLONES
#endif

namespace cpmcu {
namespace {

CPMCU_CLONES int16_t largest_of(const int16_t* bits, int64_t count) {
  int16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<int16_t>(bits[i] & 0x7fff));
  }
  return largest;
}

CPMCU_CLONES int32_t largest_of(const int32_t* bits, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits[i] & 0x7fffffff);
  return largest;
}

CPMCU_CLONES int8_t largest_of(const int8_t* bits, int64_t count) {
  int8_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<int8_t>(bits[i] & 0x7f));
  }
  return largest;
}

template <typename Bits>
int64_t find(const void* numbers, int64_t count, Bits infinity) {
  const auto* bits = static_cast<const Bits*>(numbers);
  if (largest_of(bits, count) < infinity) return -1;
  const Bits magnitude = std::numeric_limits<Bits>::max();
  return std::find_if(bits, bits + count, [&](Bits x) { return (x & magnitude) >= infinity; }) -
         bits;
}

}  // namespace

int64_t find_not_finite(DType dtype, const void* numbers, int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return find<int32_t>(numbers, count, 0x7f800000);
    case DType::kF16:
      return find<int16_t>(numbers, count, 0x7c00);
    case DType::kBF16:
      return find<int16_t>(numbers, count, 0x7f80);
    case DType::kE4M3:  // has no infinity, and one NaN of each sign
      return find<int8_t>(numbers, count, 0x7f);
    default:
      return -1;
  }
}

#ifndef CPMCU_WITH_CUDA
std::vector<int64_t> find_not_finite_on_device(const Context&, const std::vector<DeviceNumbers>&) {
  CHECK_STATE(false, "this build has no CUDA, so no numbers are in device memory");
}
#endif

}  // namespace cpmcu
