// attention_splits over an fp8 cache with attention sinks: the kernels of attention_decode.cu, in
// another file.
//
// Roofline: that of attention_decode_fp8.cu. A sink is one exponential for each token and query
// head.
//
// Surprising: a sink needs no scale of fp8 codes. Scores are scaled before the softmax, so a sink
// is compared with the same running maximum as over a 16-bit cache.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"

namespace cpmcu::cuda {

void attention_splits_fp8_sinks(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("attention_decode with sinks: head_dim", params.head_dim, [&](auto dim) {
      launch_all_splits<decltype(element), dim.value, true, true>(ctx, params);
    });
  });
}

}  // namespace cpmcu::cuda
