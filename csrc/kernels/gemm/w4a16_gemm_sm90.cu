// w4_gemm on Hopper: rows of x by tensor maps, and its asynchronous tensor core instructions from
// 17 rows on; for fewer, mma.sync is quicker. NOTE: both add up the 16 products of a step in the
// same way, so a row has the same bits (tests/kernels/test_w4a16.py). The kernel is in
// w4a16_kernel.cuh.
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/gemm/w4a16_kernel.cuh"
#include "kernels/gemm/w4a16_wgmma.cuh"

namespace cpmcu::cuda {
namespace {

struct MappedMmaSync : MmaSync {  // with rows of x by a tensor map
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
