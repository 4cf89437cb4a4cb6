// w4_gemm on Hopper: rows of x by tensor maps, and its asynchronous tensor core instructions from
// 17 rows on; for fewer, mma.sync is quicker. NOTE: both add up the 16 products of a step in the
// same way, so a row has the same bits (tests/kernels/test_w4a16.py). The kernel is in
// w4a16_kernel.cuh.
#include "kernels/gemm/w4a16_wgmma.cuh"

namespace cpmcu::cuda {

void w4_gemm_sm90(const Context& ctx, DType dtype, const void* args) {
  Args mapped = *static_cast<const Args*>(args);
  const int groups = groups_of(mapped.m);
  mapped.x_map = make_map(mapped.x, mapped.m, mapped.k, dtype, 8 * groups);
  dispatch_half(dtype, [&](auto t) {
    using T = decltype(t);
    switch (groups) {
      case 1:
        return launch_w4<MappedMmaSync, T, 1>(ctx, mapped);
      case 2:
        return launch_w4<MappedMmaSync, T, 2>(ctx, mapped);
      case 4:
        return launch_w4<WgmmaOf<2>, T, 4>(ctx, mapped);
      default:
        launch_w4<WgmmaOf<2>, T, 8>(ctx, mapped);
    }
  });
}

}  // namespace cpmcu::cuda
