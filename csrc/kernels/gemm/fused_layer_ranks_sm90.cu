// The fused layer kernel on Hopper, of GEMMs that are divided among ranks.
//
// Roofline: the weights of one rank, and for each sum the latency between two GPUs, about 1 us. A
// sum as a launch of its own (kernels/ranks/rank_sum.cu) takes about 10 us, since memory is idle
// from the end of one fused layer to the first weights of the next.
//
// Surprising: instances of their own. Within the kernel of one GPU, the code of the sum would take
// 10 registers and would spill where none are free.
#include "kernels/gemm/fused_layer/hopper.cuh"

namespace cpmcu::cuda {

void fused_layer_ranks_sm90(const Context& ctx, const FusedLayerParams& p) {
  run_on_hopper</*kSumsRanks=*/true>(ctx, p);
}

}  // namespace cpmcu::cuda
