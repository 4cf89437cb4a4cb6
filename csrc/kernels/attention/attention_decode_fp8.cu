// attention_decode over an fp8 cache. A file of its own, so that it compiles beside
// attention_decode.cu, which describes the kernels.
//
// Roofline: codes and scales are read once from HBM: 2 * entries * Hkv * (D + 4) bytes.
//
// Surprising: trees use mma.sync even on Hopper. wgmma would need the converted 16-bit numbers in
// shared memory.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"

namespace cpmcu::cuda {

// Graph-safe. attention_splits has checked the parameters.
void attention_splits_fp8(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value, true>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
