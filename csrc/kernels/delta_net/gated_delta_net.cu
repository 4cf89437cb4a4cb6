// gated_delta_net: convolution, gates, recurrence and gated norm of one layer (gated_delta_net.h),
// for heads of Dk = Dv = 128.
//
// Roofline: S is read and written once a step, 128 KiB for each value head. 32 heads take 2.6 us at
// 3.2 TB/s. A prompt is bound by the latency of the recurrence: about 150 instructions a token.
//
// Schedule: a value head of a sequence is a cluster of four CTAs on Hopper, else one CTA. A warp
// owns 8 columns of S, with 4 x 8 numbers in the registers of each lane.
//   1. Load S and the window. Prepare the accepted tokens of the last step, one warp for each.
//   2. Update S by them and store it. Until here nothing is read that this pass writes, so the work
//      overlaps the projection before it.
//   3. Prepare the step's tokens: convolution, SiLU, norms, gates -> shared memory.
//   4. Recurrence: each warp by itself, without a barrier. A node that does not follow the node
//      before it starts again from S and replays its ancestors.
//   5. Sum of squares over the head (DSMEM), norm, gate, store. Pending tokens and window.
// A prompt repeats 3 to 5 for every 16 tokens.
//
// Surprising: a prompt runs the recurrence token by token, not in chunks on tensor cores. It takes
// a few percent of the prefill's time, and its bits do not depend on chunks.
//
// All arithmetic that a token's bits depend on uses explicit intrinsics, so that the compiler
// contracts the two variants of the kernel alike.
#include "kernels/delta_net/gated_delta_net.h"

#include <algorithm>

#include "core/launch.h"
#include "kernels/delta_net/delta_net_head.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

using namespace delta_net;

// ---- kernel

// Grid: sequences * Hv * kSplit; the CTAs of a head are a cluster. kCommits: a prefill.
template <typename T, int kSplit, bool kCommits>
__global__ void __launch_bounds__(32 * kHeadWarps / kSplit)
    gated_delta_net_kernel(const __grid_constant__ DeltaArgs<T> args) {
  extern __shared__ __align__(16) char memory[];
  using Cta = Head<T, kSplit>;
  ptx::pdl_launch();
  typename Cta::Memory shared(memory, args.max_rows);
  const int unit = blockIdx.x / kSplit, seq = unit / args.num_value_heads;
  const StepTokens& tokens = args.tokens;
  const int head = unit % args.num_value_heads, slot = tokens.seq_slots[seq];
  const int first = tokens.seq_token_begin[seq];
  const int count = tokens.seq_token_begin[seq + 1] - first;
  if (count == 0) return;
  if constexpr (kSplit > 1)
    ptx::cluster_arrive_release();  // this CTA runs, so others may write to it
  const int length = tokens.slot_lengths[slot];
  const int group = args.num_value_heads / args.num_key_heads;
  const Cta cta{.args = args,
                .shared = shared,
                .part = static_cast<int>(blockIdx.x % kSplit),
                .head = head,
                .key_head = head / group,
                .first = first,
                .slot = slot,
                .at = int64_t{slot} * args.num_value_heads + head,
                .warp = static_cast<int>(threadIdx.x / 32),
                .lane = static_cast<int>(threadIdx.x % 32)};
  float* const tile =
      args.state + (cta.at * kHeadWarps + cta.part * Cta::kWarps + cta.warp) * kDim * kTile;
  Columns state;
  state.load_from(tile, cta.lane);
  typename Cta::Filters filters;
  cta.load(filters);
  cta.load_window();
  if (!kCommits && threadIdx.x < count) {
    const int j = threadIdx.x;
    shared.parents[j] = tokens.token_parents == nullptr ? j - 1 : tokens.token_parents[first + j];
  }
  const int num_accepted = cta.num_accepted(length);
  __syncthreads();
  if (!kCommits && threadIdx.x < count) {
    uint64_t nodes = 0;
    for (int node = threadIdx.x; node >= 0; node = shared.parents[node]) nodes |= 1ull << node;
    shared.ancestors[threadIdx.x] = nodes;
  }
  if (num_accepted > 0) {
    cta.fold(state, num_accepted, filters);
    if (!kCommits) state.store_to(tile, cta.lane);
  }

  if constexpr (kSplit > 1) ptx::cluster_wait();
  ptx::pdl_wait();  // all reads above are of data that earlier passes wrote
  const auto raw = [&](int i) { return i < 0 ? cta.in_window(kWindow + i) : cta.in_step(i); };
  // The token before token i; before the first token come -1, -2, … of the window.
  const auto before = [&](int i) { return kCommits || i < 0 ? i - 1 : shared.parents[i]; };
  int parity = 0;
  for (int begin = 0; begin < count; begin += args.max_rows) {
    const int rows = min(args.max_rows, count - begin);
    for (int row = cta.warp; row < rows; row += Cta::kWarps) {
      const int i = begin + row, x2 = before(i), x1 = before(x2), x0 = before(x1);
      const T* const ba = args.ba + int64_t{first + i} * args.layout.ba_row;
      cta.prepare(row, {raw(x0), raw(x1), raw(x2), raw(i)}, ba[cta.column(args.layout.b, 1)],
                  ba[cta.column(args.layout.a, 1)], filters);
    }
    __syncthreads();
    if constexpr (kCommits) {
      for (int row = 0; row < rows; ++row) {
        cta.update(state, row);
        cta.store_output(state, row);
      }
    } else {
      Columns node = state;
      for (int row = 0; row < rows; ++row) {
        if (row > 0 && shared.parents[row] != row - 1) {
          node = state;
          uint64_t ancestors = shared.ancestors[row] & ~(1ull << row);
          for (; ancestors != 0; ancestors &= ancestors - 1) {
            cta.update(node, __ffsll(static_cast<long long>(ancestors)) - 1);
          }
        }
        cta.update(node, row);
        cta.store_output(node, row);
      }
    }
    __syncthreads();
    cta.write_outputs(begin, rows, parity);
    parity ^= 1;
  }

  // The barrier in write_outputs has passed: no CTA of the head reads the old state any more.
  if (kCommits) {
    cta.move_window(count, raw);
    state.store_to(tile, cta.lane);
  } else {
    cta.store_pending(count);
  }
  if (kCommits || num_accepted > 0) cta.store_window();
  if (cta.part == 0 && threadIdx.x == 0) args.folded[cta.at] = kCommits ? length + count : length;
}

template <typename T, int kSplit, bool kCommits>
void run(const Context& ctx, const GatedDeltaNetParams& p) {
  const DeltaArgs<T> args{
      .out = p.out.as<T>(),
      .qkvz = p.qkvz.as<T>(),
      .ba = p.ba.as<T>(),
      .conv = p.conv_weight.as<T>(),
      .a_log = p.a_log.as<float>(),
      .dt_bias = p.dt_bias.as<float>(),
      .norm = p.norm_weight.as<T>(),
      .eps = p.norm_eps,
      .state = p.state.as<float>(),
      .window = p.window.as<T>(),
      .pending = p.pending.as<T>(),
      .folded = p.folded.as<int>(),
      .accepted = p.accepted,
      .layout = p.layout,
      .num_key_heads = p.shape.num_key_heads,
      .num_value_heads = p.shape.num_value_heads,
      .pending_rows = static_cast<int>(p.pending.size(2)),
      .max_rows = std::max(kCommits ? kPromptRows : p.tokens.max_seq_tokens, p.accepted.max_path),
      .tokens = p.tokens};
  const size_t bytes = Shared<T, kSplit>::num_bytes(args.max_rows);
  CHECK(static_cast<int64_t>(bytes) + 1024 <= ctx.sm_shared_bytes,
        "gated_delta_net: a step of {} tokens a sequence needs {} bytes of shared memory, an SM "
        "has {}; use a smaller draft tree",
        args.max_rows, bytes, ctx.sm_shared_bytes);
  const auto kernel = gated_delta_net_kernel<T, kSplit, kCommits>;
  allow_shared_bytes(kernel, bytes);
  launch_cluster(ctx, kSplit, kernel, dim3(p.tokens.num_seqs * args.num_value_heads * kSplit),
                 dim3(32 * kHeadWarps / kSplit), bytes, args);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: qkvz, ba, the state of the slots, accepted, and seq_slots,
// seq_token_begin, slot_lengths, token_parents.
void gated_delta_net(const Context& ctx, const GatedDeltaNetParams& p) {
  check_gated_delta_net(p);
  CHECK(p.shape.key_dim == kDim && p.shape.value_dim == kDim,
        "gated_delta_net: heads have {} and {} columns, expected {} on CUDA", p.shape.key_dim,
        p.shape.value_dim, kDim);
  check_rows("gated_delta_net", "qkvz", p.qkvz);
  check_rows("gated_delta_net", "out", p.out);
  if (p.tokens.num_tokens == 0) return;
  dispatch_half(p.qkvz.dtype(), [&](auto t) {
    using T = decltype(t);
    const bool clusters = ctx.code_capability >= 90;
    if (p.commits) {
      clusters ? run<T, 4, true>(ctx, p) : run<T, 1, true>(ctx, p);
    } else {
      clusters ? run<T, 4, false>(ctx, p) : run<T, 1, false>(ctx, p);
    }
  });
}

}  // namespace cpmcu::cuda
