// attention_decode of up to 16 splits and 8 packed rows of a KV head on Hopper: few_rows.cuh with
// the combination of splits in a cluster (few_rows_cluster.cuh), with or without rotary_kv.
//
// Roofline: that of attention_decode, without the launch of attention_combine.
//
// Surprising: a CUDA graph serves many lengths. Its clusters have as many CTAs as the longest
// sequence has splits. The CTAs after the last split of a shorter sequence end at once.
#include "core/dispatch.h"
#include "kernels/attention/decode_launch.cuh"

namespace cpmcu::cuda {
namespace {

template <typename Config>
void launch_clusters(const Context& ctx, const AttentionParams& params,
                     const typename Config::Rotary& rotary) {
  const StepTokens& tokens = params.tokens;
  const int splits = num_splits(tokens.max_kv), cluster = cluster_size_of(splits);
  const auto kernel = attention_few_rows_kernel<Config>;
  const size_t bytes = sizeof(FewRowsSmem<Config>);
  allow_shared_bytes(kernel, bytes);
  CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  launch_cluster(ctx, dim3(1, cluster), kernel, dim3(params.num_kv_heads, cluster, tokens.num_seqs),
                 Config::kThreads, bytes, make_decode_args<typename Config::Element>(ctx, params),
                 1, splits, rotary);
}

}  // namespace

// Graph-safe. attention_splits has checked the parameters.
void attention_splits_cluster_sm90(const Context& ctx, const AttentionParams& params,
                                   bool rotates) {
  dispatch_half(params.qkv.dtype(), [&](auto element) {
    using T = decltype(element);
    dispatch_int<64, 128>("attention_decode in clusters: head_dim", params.head_dim, [&](auto dim) {
      if (rotates) {
        launch_clusters<FewRowsConfig<T, dim.value, false, false, true, true>>(
            ctx, params, make_rotary_args<T>(params.rotary));
      } else {
        launch_clusters<FewRowsConfig<T, dim.value, false, false, false, true>>(ctx, params, {});
      }
    });
  });
}

}  // namespace cpmcu::cuda
