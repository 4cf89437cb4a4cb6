// out[block] = a checksum of the words that the block read: reads `in` once, as fast as memory
// gives it. The ceiling that benchmarks compare with.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct StreamReadParams {
  Tensor in;   // any, a multiple of 16 bytes long
  Tensor out;  // [kStreamReadCtas] int32
};
constexpr int kStreamReadCtas = 132 * 16;

REGISTER_OP(stream_read, StreamReadParams)

}  // namespace cpmcu
