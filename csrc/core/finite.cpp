// A number is NaN or infinite if all bits of its exponent are set: if its magnitude, taken as an
// integer, is at least that of infinity. So a block is an AND and a maximum for each vector. One
// clone for AVX2, whose vectors are twice as wide as the baseline's.
#include "core/finite.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

// A clone is picked by a resolver that runs before the sanitizers are ready, hence not under them.
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
    default:
      return -1;
  }
}

#ifndef CPMCU_WITH_CUDA
std::vector<int64_t> find_not_finite_on_device(const Context&, const std::vector<DeviceNumbers>&) {
  CHECK_STATE(false, "a build without CUDA has no numbers on a device");
}
#endif

}  // namespace cpmcu
