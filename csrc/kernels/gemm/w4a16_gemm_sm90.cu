// w4_gemm on Hopper, 1 to 64 rows: the kernel of w4a16_kernel.cuh with rows of x by TMA. It
// multiplies with mma.sync up to 16 rows, where it is faster, and with wgmma from 17 rows on. NOTE:
// both add the 16 terms of a k step in the same order, so a row has the same bits
// (tests/kernels/test_w4a16.py).
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/gemm/w4a16_kernel.cuh"
#include "kernels/gemm/w4a16_wgmma.cuh"

namespace cpmcu::cuda {
namespace {

struct MappedMmaSync : MmaSync {  // rows of x by TMA
  static constexpr bool kTensorMap = true;
};
template <int kGroups>
using HopperMma = std::conditional_t<kGroups <= 2, MappedMmaSync, WgmmaOf<2>>;

}  // namespace

void w4_gemm_sm90(const Context& ctx, DType dtype, const void* args) {
  Args mapped = *static_cast<const Args*>(args);
  mapped.x_map = make_map(mapped.x, mapped.m, mapped.k, dtype, 8 * row_groups(mapped.m));
  launch_w4_rows<HopperMma>(ctx, dtype, mapped);
}

}  // namespace cpmcu::cuda
