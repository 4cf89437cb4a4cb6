// attention_decode that applies rotary_kv first, for one token a sequence. A file of its own, so
// that it compiles beside attention_decode.cu, which describes the kernels.
//
// Roofline: that of attention_decode. The norm and the rotation of at most 18 heads a CTA take less
// time than a launch.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"

namespace cpmcu::cuda {

// Graph-safe. attention_splits has checked the parameters. Reads from the device also: positions.
void attention_splits_rotary(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    using T = decltype(element);
    dispatch_int<64, 128, 256>("attention_decode: head_dim", params.head_dim, [&](auto dim) {
      using Few = FewRowsConfig<T, dim.value, false, false, true>;
      launch_splits<Few, FewRowsSmem<Few>>(ctx, params, attention_few_rows_kernel<Few>,
                                           make_rotary_args<T>(params.rotary));
    });
  });
}

}  // namespace cpmcu::cuda
