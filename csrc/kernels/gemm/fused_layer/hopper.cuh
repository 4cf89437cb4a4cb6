// The fused layer kernel on Hopper: all layouts of weight blocks, and 16-bit W. TMA copies rows and
// weights. If there are more than 16 rows, wgmma multiplies them.
#pragma once

#include <type_traits>

#include "kernels/gemm/fused_layer/launch.cuh"
#include "kernels/gemm/packed/wgmma.cuh"

namespace cpmcu::cuda {
namespace {

// kSumsRanks: GEMMs may be divided among ranks.
template <bool kSumsRanks>
void run_on_hopper(const Context& ctx, const FusedLayerParams& p) {
  const FusedTarget target{.has_maps = true,
                           .max_rows = kMaxFusedRows,
                           .max_combined_k_blocks = HopperCopies::kMaxCombinedKBlocks,
                           .max_rotated_groups = HopperCopies::kMaxRotatedGroups};
  run_fused_layer(ctx, target, p, [&](const FusedLayerArgs& args, int groups, int num_ctas) {
    dispatch_half(p.gemms.front().x.dtype(), [&](auto t) {
      // NOTE: in a nested lambda of a template, g++ 12 makes `decltype(t)` a reference.
      using T = std::remove_reference_t<decltype(t)>;
      dispatch_int<1, 2, 4, 8, 16>("groups of rows", groups, [&](auto constant) {
        constexpr int kGroups = decltype(constant)::value;
        using Mma = std::conditional_t<kGroups <= 2, MmaSync, WgmmaOf<(kGroups >= 8 ? 1 : 2)>>;
        if (!p.gemms.front().is_dense()) {
          dispatch_unpacker(p.gemms.front().packed.layout, [&](auto unpacker) {
            using Unpacker = std::remove_reference_t<decltype(unpacker)>;
            constexpr bool kFits = kIsFused<Unpacker> && (kGroups <= 8 || Unpacker::kBits == 4);
            if constexpr (kFits && kHasRows<Unpacker, kGroups>) {
              launch_fused_layer<PackedMainloop<HopperCopies, Mma, T, kGroups, Unpacker>,
                                 kSumsRanks>(ctx, args, p.attention, num_ctas);
            }
          });
        } else if constexpr (kGroups <= 8) {
          launch_fused_layer<DenseMainloop<T, kGroups>, kSumsRanks>(ctx, args, p.attention,
                                                                    num_ctas);
        }
      });
    });
  });
}

}  // namespace
}  // namespace cpmcu::cuda
