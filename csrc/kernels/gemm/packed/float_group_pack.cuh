// Dequantisation of float codes with group scales, for packed_dequantize.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {

void dequantize_float_groups(const Context& ctx, const PackedDequantizeParams& params);

}  // namespace cpmcu::cuda
