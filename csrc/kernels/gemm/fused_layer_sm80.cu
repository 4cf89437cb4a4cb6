// The fused layer kernel in code for other targets than sm_90a (fused_layer/kernel.cuh): 4-bit
// layouts, e4m3 and int8, multiplied by mma.sync. GeForce GPUs have 98 KB of stages: two of 8 bits.
#include "kernels/gemm/fused_layer/launch.cuh"

namespace cpmcu::cuda {

void fused_layer_sm80(const Context& ctx, const FusedLayerParams& p) {
  // With PDL a launch of rotary_kv is cheap. So the kernel applies RoPE for fewer rows.
  const bool overlap = ctx.code_capability >= 90;
  const FusedTarget target{.has_maps = overlap,
                           .max_rows = kMaxRows,
                           .max_combined_k_blocks = PortableCopies::kMaxCombinedKBlocks,
                           .max_rotated_groups = overlap ? 2 : PortableCopies::kMaxRotatedGroups};
  run_fused_layer(ctx, target, p, [&](const FusedLayerArgs& args, int groups, int num_ctas) {
    dispatch_half(p.gemms.front().x.dtype(), [&](auto t) {
      dispatch_int<1, 2, 4, 8>("groups of rows", groups, [&](auto constant) {
        constexpr int kGroups = decltype(constant)::value;
        dispatch_unpacker(p.gemms.front().packed.layout, [&](auto unpacker) {
          using Unpacker = decltype(unpacker);
          if constexpr (kIsFusedAnywhere<Unpacker> && kHasRows<Unpacker, kGroups>) {
            using Mainloop =
                PackedMainloop<PortableCopies, MmaSync, decltype(t), kGroups, Unpacker>;
            launch_fused_layer<Mainloop>(ctx, args, p.attention, num_ctas);
          }
        });
      });
    });
  });
}

}  // namespace cpmcu::cuda
