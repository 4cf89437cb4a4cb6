// Tells whether an op is faster with more than one thread. Waiting OpenMP workers sleep
// (cpmcu/_extension.py), and waking them takes about 50 µs.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace cpmcu::cpu {

// `work`: number of weights that are multiplied. A thread multiplies about 2^20 in 50 µs.
inline bool threads_pay(int64_t work) {
  const int64_t threads = std::max(1, omp_get_max_threads());
  return work / threads * (threads - 1) > int64_t{1} << 20;
}

}  // namespace cpmcu::cpu
