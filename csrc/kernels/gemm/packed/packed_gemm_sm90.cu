// packed_gemm on Hopper, 1 to 64 rows: the kernel of packed/kernel.cuh with rows of x by TMA. It
// multiplies with mma.sync up to 16 rows, where it is faster, and with wgmma from 17 rows on. NOTE:
// both add the 16 terms of a k step in the same order, so a row has the same bits
// (tests/kernels/test_packed.py).
#include "kernels/gemm/packed/kernel.cuh"
#include "kernels/gemm/packed/wgmma.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

struct MappedMmaSync : MmaSync {  // as MmaSync, but TMA copies the rows of x
  static constexpr bool kTensorMap = true;
};
template <int kGroups>
using HopperMma = std::conditional_t<kGroups <= 2, MappedMmaSync, WgmmaOf<2>>;

}  // namespace

void packed_gemm_sm90(const Context& ctx, const PackedLayout& layout, DType dtype,
                      PackedGemmArgs args) {
  args.x_map = make_map(args.x, args.m, args.k, dtype, 8 * row_groups_of(layout, args.m));
  launch_packed_rows<HopperMma>(ctx, layout, dtype, args);
}

}  // namespace cpmcu::cuda
