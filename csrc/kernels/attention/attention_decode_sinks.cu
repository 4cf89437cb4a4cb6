// attention_splits with attention sinks: the kernels of attention_decode.cu, in another file.
//
// Roofline: that of attention_decode.cu. A sink is one exponential for each token and query head.
//
// Surprising: a sink is added only when the sums of a row are complete. If a row has one split,
// these kernels add it, else attention_combine. So neither splits nor trees change a row's bits.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"

namespace cpmcu::cuda {

void attention_splits_sinks(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("attention_decode with sinks: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value, false, true>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
