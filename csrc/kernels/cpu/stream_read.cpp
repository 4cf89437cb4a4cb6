#include "kernels/stream_read.h"

namespace cpmcu::cpu {

void stream_read(const Context&, const StreamReadParams& params) {
  const auto* words = params.in.as<uint32_t>();
  const int64_t count = params.in.num_bytes() / 4;
#pragma omp parallel for
  for (int block = 0; block < kStreamReadCtas; ++block) {
    const int64_t begin = count * block / kStreamReadCtas;
    const int64_t end = count * (block + 1) / kStreamReadCtas;
    uint32_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum ^= words[i];
    params.out.as<uint32_t>()[block] = sum;
  }
}

}  // namespace cpmcu::cpu
