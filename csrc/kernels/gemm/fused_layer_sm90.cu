// The fused layer kernel on Hopper.
#include "kernels/gemm/fused_layer/hopper.cuh"

namespace cpmcu::cuda {

void fused_layer_sm90(const Context& ctx, const FusedLayerParams& p) {
  run_on_hopper</*kSumsRanks=*/false>(ctx, p);
}

}  // namespace cpmcu::cuda
