// Looks for NaN and infinities in host memory, at the speed of a cache.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace cpmcu {

// The index of the first of `count` numbers that is NaN or infinite; -1 if there is none, as of a
// dtype that is not floating.
int64_t find_not_finite(DType dtype, const void* numbers, int64_t count);

}  // namespace cpmcu
