// packed_expert_gemm: y[p] = x[row of p] W[expert of p]^T with W in weight blocks (packed.h).
//
// Roofline: the W of each chosen expert is read once; int4 has N K / 2 bytes and 3 % of scales. One
// token of a 30B-A3B layer has 8 experts: gate and up 13 MB, 4.2 us at 3 TB/s; down half of it.
//
// Schedule: a warp owns 32 rows of W of one expert with pairs, a warp tile of the weight blocks,
// and every `splits`-th k block of 128 k. A CTA has 8 warps, so 8 / splits tiles.
//   cp.async  each warp copies its own blocks to shared memory; up to kStages are requested at once
//   multiply  unpacks numbers exactly, mma over the k of a scale, scale in float32
//   epilogue  expert_tiles.cuh
// A pass has up to 8 kGroups pairs. If all blocks of a warp fit its stages, the next pass finds
// them there; else it reads W again, from L2. A pair's bits do not depend on the other pairs.
//
// The surprising decision: few registers and small CTAs. With 64 registers and 33 KB, gate and up
// of one token are 384 CTAs, three an SM. All of W is requested at once, and the CTAs of down find
// room beside them. `splits` depends on K, so that a warp has 1.5 blocks or more on average.
#include "kernels/moe/expert_blocks.cuh"
#include "kernels/moe/expert_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct PackedExpertArgs {
  ExpertArgs expert;
  int k_blocks, block_bytes;
  int stages;  // of a warp
  uint8_t scale_form;
};

// Stages of a warp, and CTAs on an SM. `kGroups`: groups of 8 pairs at a time.
template <typename Unpacker, int kGroups>
constexpr int kStages = Unpacker::kBits == 8 ? 2
                        : kGroups == 1       ? 4
                                             : 3;
template <typename Unpacker, int kGroups>
constexpr int kMinBlocks = kGroups > 1            ? 1
                           : Unpacker::kBits == 8 ? 3
                                                  : 4;

// ---- kernels

template <typename T,   // __half or __nv_bfloat16
          int kGroups,  // groups of 8 pairs at a time
          typename Unpacker>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Unpacker, kGroups>)
    packed_expert_gemm_kernel(const __grid_constant__ PackedExpertArgs all) {
  extern __shared__ __align__(16) char shared[];
  const ExpertArgs& args = all.expert;
  if (!args.routing_is_complete) ptx::pdl_wait();
  const ExpertSpan span = span_of(args);
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tile = blockIdx.x * (kWarps / args.splits) + warp / args.splits;
  const int split = warp % args.splits;
  const bool has_rows = span.count > 0 && tile * kTileRows < args.n;
  const int num_blocks = has_rows ? (all.k_blocks - split + args.splits - 1) / args.splits : 0;
  const int num_passes = (span.count + 8 * kGroups - 1) / (8 * kGroups);
  const bool stays = num_blocks <= all.stages;  // all blocks are in stages at once
  const int num_loads = stays ? num_blocks : num_passes * num_blocks;
  using Stage = Stage<Unpacker>;
  Stage* const stages = reinterpret_cast<Stage*>(shared) + warp * all.stages;
  const char* const blocks =
      args.w + span.expert * args.stride +
      static_cast<int64_t>(tile / kWarpTiles) * all.k_blocks * all.block_bytes;

  int loads = 0, load_stage = 0, load_block = split;  // the next load
  const auto load_next = [&] {
    const char* block = blocks + static_cast<int64_t>(load_block) * all.block_bytes;
    copy_warp_tile<Unpacker>(stages + load_stage, block, tile % kWarpTiles, all.scale_form);
    ptx::cp_async_commit();
    ++loads;
    if (++load_stage == all.stages) load_stage = 0;
    load_block += args.splits;
    if (load_block >= all.k_blocks) load_block = split;
  };
  const int first_loads = min(all.stages, num_loads);
#pragma unroll 1
  while (loads < first_loads) load_next();
  if (args.routing_is_complete) ptx::pdl_wait();
  ptx::pdl_launch();

  const T* const x = static_cast<const T*>(args.x);
  int used = 0, stage = 0;  // blocks whose copies are complete; the current stage
#pragma unroll 1
  for (int pass = 0; pass < num_passes; ++pass) {
    const PairRows<kGroups> rows(args, span, pass * 8 * kGroups);
    // With one group, x of a block waits in registers. A k step's part is replaced by that of the
    // next block right after its use. Beyond K, x is zero. K is a multiple of 8.
    constexpr int kSteps = kPackedK / 16;
    [[maybe_unused]] uint32_t of_x[kGroups == 1 ? kSteps : 1][2];
    const auto load_x = [&](uint32_t (&to)[2], int group, int k_block, int step) {
      const int k = k_block * kPackedK + step * 16;
      const bool valid = rows.rows[group] >= 0;
      const T* from = x + rows.rows[group] + k + 2 * q;
      to[0] = valid && k < args.k ? *reinterpret_cast<const uint32_t*>(from) : uint32_t{0};
      to[1] = valid && k + 8 < args.k ? *reinterpret_cast<const uint32_t*>(from + 8) : uint32_t{0};
    };
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_x(of_x[step], 0, split, step);
    }
    if (stays) stage = 0;
    float sums[2][kGroups][4] = {};
    // Main loop over this warp's k blocks.
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      const int k_block = split + block * args.splits;
      if (pass == 0 || !stays) {
        wait_for_copies(loads - 1 - used);
        ++used;
        __syncwarp();
      }
      const Stage& from = stages[stage];
      const auto has = [&](int group) { return rows.has(group); };
      const auto x_of = [&](int step, int group, uint32_t (&b)[2]) {
        if constexpr (kGroups > 1) return load_x(b, group, k_block, step);
        b[0] = of_x[step][0], b[1] = of_x[step][1];
      };
      const auto used_x = [&](int step) {
        if constexpr (kGroups == 1) load_x(of_x[step], 0, k_block + args.splits, step);
      };
      multiply_warp_tile<Unpacker, T, kGroups>(sums, from, all.scale_form, has, x_of, used_x);
      if (loads < num_loads) {
        __syncwarp();  // all lanes have read the stage
        load_next();
      }
      if (++stage == all.stages) stage = 0;
    }
    store_pairs<T, kGroups>(args, rows, sums);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads the experts' pairs from the device.
void packed_expert_gemm(const Context& ctx, const PackedExpertGemmParams& p) {
  check_packed_expert_gemm(p);
  if (p.rows.y.size(0) == 0) return;
  CHECK(is_aligned16(p.w.blocks), "packed_expert_gemm: W is not aligned to 16 bytes");
  const int splits = splits_of(p.w.k_blocks());
  PackedExpertArgs args{
      .expert = expert_args("packed_expert_gemm", p.rows, p.w.n, splits, p.w.gated),
      .k_blocks = static_cast<int>(p.w.k_blocks()),
      .block_bytes = static_cast<int>(p.w.block_bytes()),
      .stages = 0,
      .scale_form = scale_form(p.w.layout)};
  args.expert.w = static_cast<const char*>(p.w.blocks);
  args.expert.stride = p.stride;
  const dim3 grid = expert_grid(p.rows, p.w.n, splits);
  const bool few = p.rows.y.size(0) / p.rows.routing.top_k <= kMaxRows;
  dispatch_half(p.rows.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto groups) {
      constexpr int kGroups = decltype(groups)::value;
      dispatch_unpacker(p.w.layout, [&](auto unpacker) {
        using Unpacker = decltype(unpacker);
        constexpr int kMost = kStages<Unpacker, kGroups>, kBytes = kWarps * sizeof(Stage<Unpacker>);
        const auto kernel = packed_expert_gemm_kernel<T, kGroups, Unpacker>;
        args.expert.alpha = 1 / Unpacker::template kFactor<T>;
        args.stages = std::min(kMost, (args.k_blocks + splits - 1) / splits);
        allow_shared_bytes(kernel, kMost * kBytes);
        launch(ctx, kernel, grid, dim3(kThreads), args.stages * kBytes, args);
      });
    };
    few ? run(IntConstant<1>{}) : run(IntConstant<4>{});
  });
}

}  // namespace cpmcu::cuda
