// sample: draws one token for each row of logits (contract: kernels/sampling/sample.h).
//
// Roofline: the logits are read once from L2, 4 bytes a token. Then the latency of the passes
// counts: one if greedy; otherwise maximum (1), top-k (3), top-p (3) and draw (1).
//
// Schedule: a team of CTAs handles one row. On sm_90 and later it is a cluster of up to 4 CTAs that
// exchange partial results through distributed shared memory; on older GPUs it is one CTA. In every
// pass a thread sees the same tokens, four adjacent ones at a time. These share one Philox counter.
//
// Top-k and top-p are the same search: the largest logit such that the tokens from it upwards weigh
// at least a target. A token weighs 1 (top-k), or its probability in units of 2^-40 (top-p). The
// search is a radix select (11 + 11 + 10 bits) over an order-preserving integer image of the
// logits. Weights are integers, so neither the order of atomics nor the team size changes a result.
// Shared memory has no 64-bit atomic add: a bin is two words, and an overflow of the low word
// carries.
//
// Surprising: adjusted logits are never stored. Each pass recomputes them from logits, counts and
// bias, which are in L1 after the first pass. The logits stay raw for the log-probabilities.
#include <type_traits>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"
#include "kernels/sampling/row_sampler.cuh"

namespace cpmcu::cuda {
namespace {

// ---- kernels

// Grid: (kTeam, R). Without clusters, the first CTA of a row does all the work. `kCandidates`: also
// writes the candidates of the row.
template <bool kAligned, int kTeam, bool kCandidates>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleArgs args) {
  using Team = TeamOf<kTeam>;
  __shared__ Smem smem;
  ptx::pdl_launch();
  ptx::pdl_wait();
  if (blockIdx.x >= Team::kCtas) return;
  Team::sync();  // other CTAs may write to a CTA's shared memory only after it has started

  const int row = blockIdx.y;
  RowSampler<kAligned, kTeam> sampler(args, smem, row);
  const int token = sampler.choose(args.token_positions[row] + 1);
  if (blockIdx.x == 0 && threadIdx.x == 0) args.tokens[row] = token;
  if constexpr (kCandidates) sampler.write_candidates(token, args.candidates[row]);
  if (token != kNoToken && sampler.s.num_logprobs >= 0) {
    sampler.template write_logprobs<kCandidates>(token, args.logprobs[row],
                                                 kCandidates ? args.candidates + row : nullptr);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: token_slots, token_positions, sampling, counts, bias,
// tree_tokens, tree_masks, mask_rows, masks.
void sample(const Context& ctx, const SampleParams& p) {
  CHECK(p.logits.dtype() == DType::kF32 && p.logits.num_dims() == 2 && p.logits.size(1) > 0,
        "sample: logits are {} {}, expected float32 [rows, vocabulary]", name_of(p.logits.dtype()),
        p.logits.shape_text());
  CHECK(!p.tree_tokens || (p.tree_masks && p.tree_size >= 1 && p.tree_size <= kMaxTreeSize),
        "sample: trees of {} nodes, expected 1 to {} and tree_masks", p.tree_size, kMaxTreeSize);
  CHECK(!p.mask_rows || p.masks, "sample: mask_rows is set, masks is null; expected both");
  if (p.logits.size(0) == 0) return;
  const int vocab_size = static_cast<int>(p.logits.size(1));
  const SampleArgs args{.logits = p.logits.as<float>(),
                        .token_slots = p.token_slots,
                        .token_positions = p.token_positions,
                        .sampling = p.sampling,
                        .counts = p.counts,
                        .bias = p.bias,
                        .tree_tokens = p.tree_tokens,
                        .tree_masks = p.tree_masks,
                        .tree_size = p.tree_size,
                        .mask_rows = p.mask_rows,
                        .masks = p.masks,
                        .tokens = p.tokens,
                        .logprobs = p.logprobs,
                        .vocab_size = vocab_size,
                        .candidates = p.candidates};
  const bool aligned = vocab_size % 4 == 0 && is_aligned16(p.logits.data()) &&
                       is_aligned16(p.counts) && is_aligned16(p.bias);
  const auto launch_team = [&](auto team) {
    const auto draw =
        aligned ? sample_kernel<true, team.value, false> : sample_kernel<false, team.value, false>;
    const auto draw_and_list =
        aligned ? sample_kernel<true, team.value, true> : sample_kernel<false, team.value, true>;
    const auto kernel = p.candidates == nullptr ? draw : draw_and_list;
    launch_cluster(ctx, team.value, kernel, dim3(team.value, p.logits.size(0)), dim3(kThreads), 0,
                   args);
  };
  // A CTA occupies an SM, so a row without a free SM waits for a whole draw. Clusters of four leave
  // SMs unused (30 of 33 clusters run at a time on an H100); pairs fill all SMs.
  const int64_t rows = p.logits.size(0);
  if (rows * 4 <= ctx.sm_count * 9 / 10) {
    launch_team(std::integral_constant<int, 4>{});
  } else if (rows * 2 <= ctx.sm_count) {
    launch_team(std::integral_constant<int, 2>{});
  } else {
    launch_team(std::integral_constant<int, 1>{});
  }
}

}  // namespace cpmcu::cuda
