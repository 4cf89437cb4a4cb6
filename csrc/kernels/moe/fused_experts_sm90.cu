// fused_experts for Hopper: a layer of experts for up to 8 tokens as one launch.
//
// Roofline: the chosen experts are read once. A token of Qwen3-30B-A3B reads 19.5 MB with 4 bits,
// 6.5 us at 3 TB/s. As separate launches the ops take 25 us.
//
// Schedule: one persistent CTA of 24 warps per SM, in clusters of two.
//   norm     every CTA norms all rows to shared memory, as moe_router
//   router   a CTA has every gridDim.x-th row of W, in registers before x arrives, and sends a
//   logit choice   every CTA receives all logits, chooses and sorts, as moe_router gate up  units
//   of 8 / splits warp tiles of an expert go round the CTAs; `splits` warps share K down     a
//   cluster has 32 rows of W of all experts; its 16 warps share the experts and K sum      CTA r of
//   the cluster adds 16 of these rows over the ranks, and then to the residual norm     every CTA
//   receives the squares of all rows, and norms its own 16 numbers of each
// A warp copies its blocks of gate and up, then those of down, to its own stages. So weights of
// down are requested while CTAs still wait for activations.
//
// The order of additions in each part is that of moe_router, packed_expert_gemm, moe_combine and
// rms_norm. So y has their bits.
//
// The surprising decision: no grid barrier. A number and the number of the launch are one 8-byte
// store (a message). A receiver polls for the messages that it needs: logits, activations, squares.
// So there is no fence, and nothing to reset.
#include <algorithm>
#include <utility>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/trace.cuh"
#include "kernels/launch_checks.h"
#include "kernels/moe/fused_experts.h"
#include "kernels/moe/fused_experts/multiply.cuh"
#include "kernels/moe/fused_experts/outputs.cuh"
#include "kernels/moe/fused_experts/router.cuh"

namespace cpmcu::cuda {
namespace {

using namespace fused_experts_parts;

TRACED_FILE("fused_experts");

// Shared memory of a CTA besides the static one.
constexpr int kSharedBytes = 222 * 1024;

// ---- kernel

template <typename T, typename Unpacker,
          bool kOne,  // one token
          int kHeld>  // logits of a lane, with one token: as in choose
__global__ void __maxnreg__(72)
    fused_experts_kernel(const __grid_constant__ FusedExpertsArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float sums[kNormedRows][32];
  __shared__ __align__(8) uint64_t barriers[kCtaWarps * Barriers::kOfWarp], received[2];
  const int warp = ptx::uniform_warp();
  Trace trace;
  ptx::pdl_launch();
  const bool consumes = warp < kCtaWarps;
  if (threadIdx.x < kCtaWarps * Barriers::kOfWarp) {
    ptx::mbarrier_init(ptx::shared_address(barriers + threadIdx.x), 1);
    if (threadIdx.x < 2) ptx::mbarrier_init(ptx::shared_address(received + threadIdx.x), 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_arrive();

  RouterRows router;
  if (warp < kWarps) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) router.load<T>(args, u, (u * kWarps + warp) * kChunk);
  }
  Vec16<T> norm_weights[kVirtual<kCtaWarps>];
  load_norm_weights<kCtaWarps>(norm_weights, args.norm.weight, args.k);
  ptx::pdl_wait();
  trace.stamp(1);
  // CTAs that have added to the counter in this launch have added less than kRound.
  const uint32_t launch = static_cast<uint32_t>(ptx::load_relaxed8(args.arrivals) / kRound) + 1;
  char* const x = shared + args.plan.x;
  norm_rows<kCtaWarps>(args.norm, args.tokens<kOne>(), args.k, x, norm_weights, sums,
                       [](int, int, const Vec16<T>&) {});
  if (threadIdx.x == 0) {
    ptx::add_relaxed8(args.arrivals, blockIdx.x == 0 ? kRound + 1 - gridDim.x : 1);
  }
  trace.stamp(2);
  char* const scratch = shared + args.plan.groups;
  send_logits<kOne, T>(args, router, x, reinterpret_cast<float*>(scratch), launch);
  trace.stamp(3);
  const Routing routing = routing_at(args, shared + args.plan.routing);
  choose_all<kOne, kHeld>(args, routing, scratch, launch);
  trace.stamp(4);

  WarpStages<Unpacker> stages{
      .data = reinterpret_cast<const Stage<Unpacker>*>(shared) + warp * args.stages,
      .barriers = ptx::shared_address(barriers + warp % kCtaWarps * Barriers::kOfWarp),
      .count = args.stages};
  char* const of_group = scratch + warp / kWarps * args.plan.group_bytes;
  if (consumes) {
    multiply_gate_up<kOne, T>(args, routing, stages, x, reinterpret_cast<float*>(of_group), launch);
    ptx::named_barrier(1 + warp / kWarps, kThreads);  // the group's sums are read
  } else {
    load_weights<Unpacker>(args, routing, ptx::shared_address(shared),
                           ptx::shared_address(barriers));
    __syncwarp();
  }
  trace.stamp(5);

  const int token = threadIdx.x / kOwnRows, row = threadIdx.x % kOwnRows;
  float* const owned = reinterpret_cast<float*>(shared + args.plan.owned);
  char* const acts = of_group + warp % kWarps * (args.plan.act_slots * kColumns<kOne> * kActBytes);
  ptx::cluster_wait();  // the other CTA runs
#pragma unroll 1
  for (int round = 0; round < args.rounds; ++round) {
    const char* results = shared + args.plan.results + round % 2 * args.plan.results_round;
    const int column = own_column(round) + row;
    const bool has = token < args.tokens<kOne>() && column < args.k;
    const T* hidden = static_cast<const T*>(args.hidden);
    const float old = has ? to_float(hidden[token * args.k + column]) : 0.0f;
    const uint32_t arrived = ptx::shared_address(received + round % 2);
    if (threadIdx.x == 0) {
      ptx::mbarrier_expect_bytes(
          arrived, args.tokens<kOne>() * args.top_k * args.down.splits * kOwnRows * 4);
    }
    if (consumes) {
      multiply_down<kOne, T>(args, routing, stages, round, acts, ptx::shared_address(results),
                             arrived, launch);
    }
    trace.stamp(6);
    if (own_column(round) < args.k) ptx::mbarrier_wait(arrived, round / 2 % 2);
    trace.stamp(7);
    add_ranks<kOne, T>(args, routing, round, reinterpret_cast<const float*>(results), owned, old,
                       launch);
  }
  if (args.normed != nullptr && own_column(0) < args.k) {
    __syncthreads();  // `owned` is complete
    norm_own<kOne, T>(args, owned, sums, launch);
  }
  trace.stamp(8);
  trace.end();
}

// Calls f(unpacker). Other layouts have no kernel (can_fuse_experts).
template <typename F>
void dispatch_fused(const PackedLayout& layout, F f) {
  switch (layout.codes) {
    case Codes::kInt4:
      return layout.zero_points ? f(Int4<Zeros::kAll>{}) : f(Int4<Zeros::kNone>{});
    case Codes::kE4m3:
      return f(E4m3{});
    case Codes::kE2m1:
      return f(E2m1{});
    default:
      CHECK_STATE(false, "fused_experts has no kernel for the layout of its weights");
  }
}

ExpertMatrix matrix_of(const PackedWeight& w, int64_t stride) {
  return {.blocks = static_cast<const char*>(w.blocks),
          .stride = stride,
          .k_blocks = static_cast<int>(w.k_blocks()),
          .block_bytes = static_cast<int>(w.block_bytes()),
          .tiles = static_cast<int>((w.n + kWarpTileRows - 1) / kWarpTileRows),
          .splits = splits_of(w.k_blocks()),
          .form = scale_form(w.layout)};
}

// Plans shared memory behind `ring_bytes` of stages. A group of warps first has the sums of gate
// and up, then activations.
SharedPlan shared_plan(const FusedExpertsArgs& args, int ring_bytes) {
  SharedPlan plan{};
  int at = ring_bytes;
  const auto take = [&](int bytes) { return std::exchange(at, (at + bytes + 15) / 16 * 16); };
  const int num_pairs = args.m * args.top_k, columns = args.m == 1 ? 1 : kTokens;
  plan.act_slots = args.m == 1 ? 2 : 1;
  const int sums = 2 * kWarps * columns * kTileSums * 4;
  plan.group_bytes = std::max(sums, kWarps * plan.act_slots * columns * kActBytes);
  plan.x = take(args.m * normed_stride(args.k));
  plan.groups = take(std::max(kCtaGroups * plan.group_bytes, scratch_bytes(args.m)));
  plan.results_round = num_pairs * args.down.splits * kOwnRows * 4;
  plan.results = take(plan.results_round * std::min(args.rounds, 2));
  plan.owned = take(args.rounds * args.m * kOwnRows * 4);
  plan.routing = take(routing_bytes(num_pairs, args.num_experts));
  plan.bytes = at;
  return plan;
}

}  // namespace

// Graph-safe.
bool fused_experts_sm90(const Context& ctx, const FusedExpertsParams& p) {
  const MoeRouterParams& router = p.router;
  const MoeCombineParams& combine = p.combine;
  const int64_t k = router.x.size(1), num_tokens = router.x.size(0);
  FusedExpertsArgs args{.norm = {.x = router.norm.x.data(),
                                 .weight = router.norm.weight.data(),
                                 .eps = router.norm.eps,
                                 .offset = router.norm.weight_offset,
                                 .warps = norm_warps_of(k)},
                        .router_w = router.w.data(),
                        .gate_up = matrix_of(p.weights.gate_up, p.weights.gate_up_stride),
                        .down = matrix_of(p.weights.down, p.weights.down_stride),
                        .hidden = combine.hidden.data(),
                        .normed = combine.norm.out.data(),
                        .next_weight = combine.norm.weight.data(),
                        .next_eps = combine.norm.eps,
                        .next_offset = combine.norm.weight_offset,
                        .scale = combine.scale,
                        .alpha = 1,
                        .m = static_cast<int>(num_tokens),
                        .k = static_cast<int>(k),
                        .width = static_cast<int>(p.weights.down.k),
                        .num_experts = router.routing.num_experts,
                        .top_k = router.routing.top_k,
                        .renormalise = router.renormalise,
                        .stages = 0,
                        .rounds = 0,
                        .plan = {},
                        .arrivals = p.memory.as<uint64_t>(),
                        .logits = nullptr,
                        .acts = nullptr,
                        .squares = nullptr};
  const int clusters = ctx.sm_count / 2;
  args.rounds = (args.down.tiles + clusters - 1) / clusters;
  if (args.rounds > kMaxRounds || 2 * clusters * 8 < args.num_experts || 2 * clusters >= kRound) {
    return false;
  }
  args.acts = args.arrivals + 2;
  args.logits = args.acts + kTokens * args.top_k * ((args.width + 15) / 16) * 8;
  args.squares = args.logits + kTokens * args.num_experts;
  dispatch_half(router.x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_fused(p.weights.gate_up.layout, [&](auto unpacker) {
      using Unpacker = decltype(unpacker);
      constexpr int kStageBytes = kCtaWarps * sizeof(Stage<Unpacker>);
      args.stages = std::min(kMaxStages, (kSharedBytes - shared_plan(args, 0).bytes) / kStageBytes);
      if (args.stages == 0) return;
      args.plan = shared_plan(args, args.stages * kStageBytes);
      args.alpha = 1 / Unpacker::template kFactor<T>;
      const auto run = [&](auto kernel) {
        allow_shared_bytes(kernel, kSharedBytes);
        ctx.restart_overlap();
        launch_cluster(ctx, 2, kernel, dim3(2 * clusters), dim3(kCtaThreads), args.plan.bytes,
                       args);
      };
      if (args.m > 1) return run(fused_experts_kernel<T, Unpacker, false, 0>);
      args.num_experts <= 128 ? run(fused_experts_kernel<T, Unpacker, true, 4>)
                              : run(fused_experts_kernel<T, Unpacker, true, 8>);
    });
  });
  return args.stages > 0;
}

}  // namespace cpmcu::cuda
