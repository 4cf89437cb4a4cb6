// stream_read: out[CTA] = a checksum of the words that the CTA read. It reads `in` once at the full
// memory bandwidth. Benchmarks use its rate as the ceiling.
#pragma once

#include "kernels/op.h"

namespace cpmcu {

struct StreamReadParams {
  Tensor in;   // any shape; its size is a multiple of 16 bytes
  Tensor out;  // [kStreamReadCtas] int32: a checksum of each CTA
};
constexpr int kStreamReadCtas = 132 * 16;

REGISTER_OP(stream_read, StreamReadParams)

}  // namespace cpmcu
