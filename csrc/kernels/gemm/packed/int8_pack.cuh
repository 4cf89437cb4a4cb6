// Dequantisation of 8-bit integers, for packed_dequantize.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {

void dequantize_int8(const Context& ctx, const PackedDequantizeParams& params);

}  // namespace cpmcu::cuda
