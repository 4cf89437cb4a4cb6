// packed_gemm and packed_dequantize for all layouts but int4: rows are decoded to float32.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cpu {

void packed_gemm_decoded(const PackedGemmParams& p);
void packed_dequantize_decoded(const PackedDequantizeParams& p);

}  // namespace cpmcu::cpu
