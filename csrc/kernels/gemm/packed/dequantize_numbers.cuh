// packed_dequantize of all layouts but int4.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {

void dequantize_numbers(const Context& ctx, const PackedDequantizeParams& params);

}  // namespace cpmcu::cuda
