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
#include "core/ptx.cuh"
#include "kernels/gemm/packed/multiply.cuh"
#include "kernels/moe/expert_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct PackedExpertArgs {
  ExpertArgs expert;
  int k_blocks, block_bytes;
  int stages;  // of a warp
  uint8_t scale_form;
};

// A warp tile of a weight block in shared memory.
template <typename Unpacker>
struct alignas(16) Stage {
  char codes[kWarpTileBytes<Unpacker>];
  char extra[Unpacker::kExtraBytes / kWarpTiles];  // scales, then tile data (unpack.cuh)
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

// Waits until at most `pending` of this thread's copies are unfinished.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending <= 0) {
    ptx::cp_async_wait<0>();
  } else if (pending == 1) {
    ptx::cp_async_wait<1>();
  } else if (pending == 2) {
    ptx::cp_async_wait<2>();
  } else {
    ptx::cp_async_wait<3>();
  }
}

// Copies a warp tile of a weight block to a stage, asynchronously. By a warp.
template <typename Unpacker>
__device__ __forceinline__ void copy_warp_tile(Stage<Unpacker>* stage, const char* block, int tile,
                                               uint8_t form) {
  constexpr int kBytes = kWarpTileBytes<Unpacker>;
  const int lane = threadIdx.x % 32, row = tile * kWarpTileRows;
  const uint32_t to = ptx::shared_address(stage) + lane * 16;
  const char* codes = block + tile * kBytes + lane * 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += 512) ptx::cp_async16(to + i, codes + i);
  const int scale_lanes = Unpacker::scale_bytes(form) / kWarpTiles / 16;
  const int tile_lanes = Unpacker::tile_bytes(form) / kWarpTiles / 16;
  const auto copy_extra = [&](int i) {
    const uint32_t at = to + kBytes + (i - lane) * 16;
    if (i < scale_lanes) {
      ptx::cp_async16(at,
                      block + kScaleOffset<Unpacker> + Unpacker::scale_place(row, form) + i * 16);
    } else if (i < scale_lanes + tile_lanes) {
      ptx::cp_async16(at, block + tile_offset<Unpacker>(form) +
                              row * Unpacker::tile_row_bytes(form) + (i - scale_lanes) * 16);
    }
  };
  constexpr int kLanes = Unpacker::kExtraBytes / kWarpTiles / 16;
  static_assert(kLanes <= 64, "at most two copies for each lane");
  copy_extra(lane);
  if constexpr (kLanes > 32) copy_extra(lane + 32);
}

// ---- kernels

// The end of a group of k: adds the scaled partial sums, and clears them. `g`: the lane's first
// row.
template <typename Unpacker, typename T, int kGroups>
__device__ __forceinline__ void add_scaled(float (&sums)[2][kGroups][4],
                                           float (&part)[2][kGroups][4],
                                           XSums<Unpacker, T, kGroups>& x_sums, const char* scales,
                                           int g, int k_group, uint8_t form) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int step = Unpacker::scale_step(form);
    const char* place = scales + Unpacker::scale_place(g, form) + 2 * t * step;
    const float scale[2] = {Unpacker::load_scale(place, k_group, form),
                            Unpacker::load_scale(place + step, k_group, form)};
    [[maybe_unused]] float minimum[2];
    if constexpr (kHasMinimum<Unpacker>) {
      const char* of = place + Unpacker::scale_bytes(form) / kWarpTiles;
      minimum[0] = Unpacker::load_min(of, k_group, form);
      minimum[1] = Unpacker::load_min(of + step, k_group, form);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[t][group][i] = __fmaf_rn(scale[i / 2], part[t][group][i], sums[t][group][i]);
        part[t][group][i] = 0;
        if constexpr (kHasMinimum<Unpacker>) {
          sums[t][group][i] = __fmaf_rn(-minimum[i / 2], x_sums.of[group][i], sums[t][group][i]);
        }
      }
    }
  }
  if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of);
}

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
    uint32_t of_x[kGroups == 1 ? kSteps : 1][2];
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
      typename Unpacker::template Tile<T> tiles[2];
      float part[2][kGroups][4] = {};
      [[maybe_unused]] XSums<Unpacker, T, kGroups> x_sums;
      [[maybe_unused]] uint32_t ones[4];
      if constexpr (kHasMinimum<Unpacker>) clear(x_sums.of), x_sums.make_ones(ones);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k_group = step / Unpacker::kScaleSteps;
        if (step % Unpacker::kScaleSteps == 0) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const char* place = from.extra + Unpacker::scale_bytes(all.scale_form) / kWarpTiles +
                                k_group + (t * 16 + g) * Unpacker::tile_row_bytes(all.scale_form);
            tiles[t] = Unpacker::template load_tile<T>(place, all.scale_form);
          }
        }
        const StepCodes<Unpacker> codes(from.codes, step, lane);
        uint32_t a[2][4];
        Unpacker::template unpack<T>(a[0], codes.tile[0], tiles[0], step);
        Unpacker::template unpack<T>(a[1], codes.tile[1], tiles[1], step);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (!rows.has(group)) continue;
          uint32_t (&b)[2] = of_x[kGroups == 1 ? step : 0];
          if constexpr (kGroups > 1) load_x(b, group, k_block, step);
#pragma unroll
          for (int t = 0; t < 2; ++t) ptx::mma_16x8x16<T>(part[t][group], a[t], b[0], b[1]);
          if constexpr (kHasMinimum<Unpacker>) {
            ptx::mma_16x8x16<T>(x_sums.of[group], ones, b[0], b[1]);
          }
          if constexpr (kGroups == 1) load_x(b, 0, k_block + args.splits, step);
        }
        if ((step + 1) % Unpacker::kScaleSteps != 0) continue;
        add_scaled<Unpacker, T, kGroups>(sums, part, x_sums, from.extra, g, k_group,
                                         all.scale_form);
      }
      if (loads < num_loads) {
        __syncwarp();  // all lanes have read the stage
        load_next();
      }
      if (++stage == all.stages) stage = 0;
    }
    store_pairs<T, kGroups>(args, rows, sums);
  }
}

// The number of warps that share K: at most 8, with 1.5 k blocks each on average.
int splits_of(int64_t k_blocks) {
  int splits = 1;
  while (splits < kWarps && k_blocks >= 3 * splits) splits *= 2;
  return splits;
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
