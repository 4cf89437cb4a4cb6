// The fused layer kernel on Hopper (fused_layer/kernel.cuh): all layouts of weight blocks, and
// 16-bit W. TMA copies rows and weights. If there are more than 16 rows, wgmma multiplies them.
#include "kernels/gemm/fused_layer/launch.cuh"
#include "kernels/gemm/packed/wgmma.cuh"

namespace cpmcu::cuda {

void fused_layer_sm90(const Context& ctx, const FusedLayerParams& p) {
  const FusedTarget target{.has_maps = true,
                           .max_rows = kMaxFusedRows,
                           .max_combined_k_blocks = HopperCopies::kMaxCombinedKBlocks,
                           .max_rotated_groups = HopperCopies::kMaxRotatedGroups};
  run_fused_layer(ctx, target, p, [&](const FusedLayerArgs& args, int groups, int num_ctas) {
    dispatch_half(p.gemms.front().x.dtype(), [&](auto t) {
      using T = decltype(t);
      dispatch_int<1, 2, 4, 8, 16>("groups of rows", groups, [&](auto constant) {
        constexpr int kGroups = decltype(constant)::value;
        using Mma = std::conditional_t<kGroups <= 2, MmaSync, WgmmaOf<(kGroups >= 8 ? 1 : 2)>>;
        if (!p.gemms.front().is_dense()) {
          dispatch_unpacker(p.gemms.front().packed.layout, [&](auto unpacker) {
            using Unpacker = decltype(unpacker);
            constexpr bool kFits = kIsFused<Unpacker> && (kGroups <= 8 || Unpacker::kBits == 4);
            if constexpr (kFits && kHasRows<Unpacker, kGroups>) {
              launch_fused_layer<PackedMainloop<HopperCopies, Mma, T, kGroups, Unpacker>>(
                  ctx, args, p.attention, num_ctas);
            }
          });
        } else if constexpr (kGroups <= 8) {
          launch_fused_layer<DenseMainloop<T, kGroups>>(ctx, args, p.attention, num_ctas);
        }
      });
    });
  });
}

}  // namespace cpmcu::cuda
