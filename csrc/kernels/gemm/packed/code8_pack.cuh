// Dequantisation of 8-bit codes, for packed_dequantize.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {

void dequantize_e4m3(const Context& ctx, const PackedDequantizeParams& params);

}  // namespace cpmcu::cuda
