// w4_gemm with Hopper's asynchronous tensor core instructions; the kernel is in w4a16_kernel.cuh.
#include "kernels/gemm/w4a16_wgmma.cuh"

namespace cpmcu::cuda {

template <int>
using HopperMma = WgmmaOf<2>;

void w4_gemm_sm90(const Context& ctx, DType dtype, const void* args) {
  Args mapped = *static_cast<const Args*>(args);
  mapped.x_map = make_map(mapped.x, mapped.m, mapped.k, dtype, 8 * row_groups(mapped.m));
  launch_w4_rows<HopperMma, 4, 8>(ctx, dtype, mapped);
}

}  // namespace cpmcu::cuda
