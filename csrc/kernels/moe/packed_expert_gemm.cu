// packed_expert_gemm: y[p] = x[row of p] W[expert of p]^T with W in weight blocks (packed.h).
//
// Roofline: the W of each chosen expert is read once; int4 has N K / 2 bytes and 3 % of scales. One
// token of a 30B-A3B layer has 8 experts: gate and up 13 MB, 4.2 us at 3 TB/s; down half of it.
//
// Issue slots: for one token, the warps' instructions take as long as the bytes. A k block of MXFP4
// takes 405 instructions of a warp, one of int4 260. So the loop has few besides unpack and mma.
//
// Schedule: a warp owns a warp tile of one expert with pairs, 32 rows of W. It multiplies every
// `splits`-th block of 128 k, the last first. A CTA has 8 warps, so 8 / splits tiles. If there are
// tiles enough for all SMs (kWhole), a warp computes all splits of its tile, one after the other.
// Each split has sums of its own, so the bits are the same, and a tile has a third fewer
// instructions. Its warps need no barrier.
//   cp.async  each warp copies its own blocks to shared memory; up to kStages are requested at once
//   multiply  unpacks numbers exactly, mma over the k of a scale, scale in float32
//   epilogue  expert_tiles.cuh
// A pass has up to 8 kGroups pairs. If all blocks of a warp fit its stages, the next pass finds
// them there; else it reads W again, from L2. A pair's bits do not depend on the other pairs.
//
// The surprising decision: few registers and small CTAs. With 64 registers and 33 KB, gate and up
// of one token are 384 CTAs, three an SM. All of W is requested at once, and the CTAs of down find
// room beside them. `splits` depends on K, so that a warp has 1.5 blocks or more on average.
//
// Length of packed_expert_gemm_kernel: the loads of x share all scalars with the main loop. With
// them in a struct, ptxas 13.0 spills 56 to 124 bytes of a thread with 64 registers (K4).
#include "core/ptx.cuh"
#include "kernels/gemm/packed/multiply.cuh"
#include "kernels/moe/expert_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct PackedExpertArgs {
  ExpertArgs expert;
  int k_blocks, block_bytes;
  int stages;      // number of stages of a warp
  int order_bits;  // if kWhole, a warp computes 2^order_bits splits
  uint8_t scale_form;
};

// A warp tile of a weight block in shared memory.
template <typename Unpacker>
struct alignas(16) Stage {
  char codes[kWarpTileBytes<Unpacker>];
  char extra[Unpacker::kExtraBytes / kWarpTiles];  // scales, then tile data (unpack.cuh)
};

// Stages of a warp. `kGroups`: groups of 8 pairs at a time.
template <typename Unpacker, int kGroups, bool kWhole>
constexpr int kStages = Unpacker::kBits == 8      ? 2
                        : kGroups == 1 && !kWhole ? 4
                                                  : 3;
// CTAs that the registers of an SM must hold.
template <typename Unpacker, int kGroups, bool kWhole>
constexpr int kMinBlocks = kGroups > 1            ? 1
                           : Unpacker::kBits == 8 ? (kWhole ? 2 : 3)
                           : kWhole               ? 3
                                                  : 4;

// The k blocks of a warp that computes all splits: those of each split in turn, the last first.
struct BlockOrder {
  int k_blocks, bits;  // of W; there are 2^bits splits
  int split, at;       // of the current block

  __device__ __forceinline__ BlockOrder(int blocks, int split_bits)
      : k_blocks(blocks), bits(split_bits), split(0), at(last_of(0)) {}
  __device__ __forceinline__ int last_of(int of) const {
    return of + ((k_blocks - 1 - of) >> bits << bits);
  }
  __device__ __forceinline__ bool ends_split() const { return at >> bits == 0; }
  // Goes on to the next block. After the last one comes the first one.
  __device__ __forceinline__ void advance() {
    at -= 1 << bits;
    if (at >= 0) return;
    split = (split + 1) & ((1 << bits) - 1);
    at = last_of(split);
  }
};

// Copies of a warp's tile of its weight blocks to stages, asynchronous. K blocks of a split are
// copied from the last to the first. So if a warp has one split, only the first block of a pass can
// end beyond K.
template <typename Unpacker, int kMostStages, bool kWhole>
struct TileCopies {
  static constexpr int kBytes = kWarpTileBytes<Unpacker>;
  static constexpr int kExtraLanes = Unpacker::kExtraBytes / kWarpTiles / 16;
  // Copies of a lane for scales and tile data.
  static constexpr int kExtras = (kExtraLanes + 31) / 32;

  Stage<Unpacker>* stages;
  int num_stages, num_blocks;
  const char* from;           // the lane's first codes of the next block; of block 0, if kWhole
  int step;                   // bytes from the next block to the one after; of a block, if kWhole
  BlockOrder order;           // place of the next block, if kWhole
  int extra_places[kExtras];  // offsets from the codes in bytes; 0: the lane has no such copy
  int to_load, of_pass;       // number of blocks to copy: in all, and in this pass
  int stage = 0;              // stage of the next block, if the stages cannot hold all blocks

  // Copies as many blocks as fit the stages. `first`: the first of `blocks` blocks of a pass.
  __device__ __forceinline__ TileCopies(Stage<Unpacker>* to, int stages_of_warp, const char* first,
                                        int bytes_to_next, const BlockOrder& first_block, int tile,
                                        int blocks, int loads, uint8_t form)
      : stages(to),
        num_stages(stages_of_warp),
        num_blocks(blocks),
        step(bytes_to_next),
        order(first_block) {
    const int lane = threadIdx.x % 32, row = tile * kWarpTileRows;
    const int place = tile * kBytes + lane * 16;
    from = first + place;
    const int scale_lanes = Unpacker::scale_bytes(form) / kWarpTiles / 16;
    const int tile_lanes = Unpacker::tile_bytes(form) / kWarpTiles / 16;
#pragma unroll
    for (int i = 0; i < kExtras; ++i) {
      const int at = lane + i * 32;
      const int extra = at < scale_lanes
                            ? kScaleOffset<Unpacker> + Unpacker::scale_place(row, form) + at * 16
                            : tile_offset<Unpacker>(form) + row * Unpacker::tile_row_bytes(form) +
                                  (at - scale_lanes) * 16;
      extra_places[i] = at < scale_lanes + tile_lanes ? extra - place : 0;
    }
    const int first_loads = min(num_stages, loads);
    to_load = loads - first_loads, of_pass = num_blocks - first_loads;
#pragma unroll
    for (int i = 0; i < kMostStages; ++i) {
      if (i < first_loads) copy(stages + i);
      ptx::cp_async_commit();
    }
  }
  __device__ __forceinline__ void copy(Stage<Unpacker>* stage_of_block) {
    const uint32_t to = ptx::shared_address(stage_of_block) + threadIdx.x % 32 * 16;
    const char* const codes = kWhole ? from + int64_t{order.at} * step : from;
#pragma unroll
    for (int i = 0; i < kBytes; i += 512) ptx::cp_async16(to + i, codes + i);
#pragma unroll
    for (int i = 0; i < kExtras; ++i) {
      ptx::cp_async16_if(extra_places[i] != 0, to + kBytes + i * 512, codes + extra_places[i]);
    }
    if constexpr (kWhole) {
      order.advance();
    } else {
      from += step;
    }
  }
  // Waits for the next block. By a warp.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kMostStages - 1>();
    __syncwarp();
  }
  // Copies the next block, if there is one, to the stage that the warp has read. A group of copies
  // is committed in any case: `wait` counts groups.
  __device__ __forceinline__ void load_next() {
    if (to_load > 0) {
      __syncwarp();  // all lanes have read the stage
      if (!kWhole && of_pass == 0) from -= int64_t{num_blocks} * step, of_pass = num_blocks;
      copy(stages + stage);
      --to_load, --of_pass;
      if (++stage == num_stages) stage = 0;
    }
    ptx::cp_async_commit();
  }
};

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

// Adds the sums of a split to those of the splits before, as store_pairs does, and clears them.
template <int kGroups>
__device__ __forceinline__ void add_split(float (&all)[2][kGroups][4],
                                          float (&sums)[2][kGroups][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) all[t][group][i] += sums[t][group][i], sums[t][group][i] = 0;
    }
  }
}

// Requests the biases of a tile, by a warp. They are complete with the first block.
template <typename T>
__device__ __forceinline__ void copy_bias(T* to, const ExpertArgs& args, int expert, int tile) {
  const int place = threadIdx.x % 32 * 8, row = tile * kTileRows + place;
  ptx::cp_async16_if(place < kTileRows && row < args.n, ptx::shared_address(to + place),
                     static_cast<const T*>(args.bias) + int64_t{expert} * args.n + row);
}

template <typename T,   // __half or __nv_bfloat16
          int kGroups,  // groups of 8 pairs that are multiplied at a time
          typename Unpacker,
          bool kWhole>  // a warp computes all splits of its tile; split_bits is 0, kGroups 1
__global__ void __launch_bounds__(kThreads, kMinBlocks<Unpacker, kGroups, kWhole>)
    packed_expert_gemm_kernel(const __grid_constant__ PackedExpertArgs all) {
  extern __shared__ __align__(16) char shared[];
  const ExpertArgs& args = all.expert;
  if (!args.routing_is_complete) ptx::pdl_wait();
  const ExpertSpan span = span_of(args);
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int splits = 1 << args.split_bits;
  const int tile = (blockIdx.x * kWarps + warp) >> args.split_bits;
  const int split = warp & (splits - 1);
  const bool has_rows = span.count > 0 && tile * kTileRows < args.n;
  const int num_blocks = has_rows ? (all.k_blocks - split + splits - 1) >> args.split_bits : 0;
  const int num_passes = (span.count + 8 * kGroups - 1) / (8 * kGroups);
  const bool stays = num_blocks <= all.stages;  // all blocks are in stages at once
  const int num_loads = stays ? num_blocks : num_passes * num_blocks;
  using Stage = Stage<Unpacker>;
  Stage* const stages = reinterpret_cast<Stage*>(shared) + warp * all.stages;
  float* const partial =
      reinterpret_cast<float*>(shared + kWarps * all.stages * static_cast<int>(sizeof(Stage)));
  const BlockOrder first_of_all(all.k_blocks, all.order_bits);
  const int first_k_block = kWhole ? first_of_all.at : split + max(num_blocks - 1, 0) * splits;
  T* const bias = reinterpret_cast<T*>(partial + kWarps * args.partial_pairs * kPartialStride);
  if (args.bias != nullptr && split == 0 && has_rows) {
    copy_bias(bias + (warp >> args.split_bits) * kTileRows, args, span.expert, tile);
  }
  TileCopies<Unpacker, kStages<Unpacker, kGroups, kWhole>, kWhole> copies(
      stages, all.stages,
      args.w + span.expert * args.stride +
          (int64_t{tile / kWarpTiles} * all.k_blocks + (kWhole ? 0 : first_k_block)) *
              all.block_bytes,
      kWhole ? all.block_bytes : -(all.block_bytes << args.split_bits), first_of_all,
      tile % kWarpTiles, num_blocks, num_loads, all.scale_form);
  if (args.routing_is_complete) ptx::pdl_wait();
  ptx::pdl_launch();

  const T* const x = static_cast<const T*>(args.x);
  int stage = 0;  // number of the current stage
#pragma unroll 1
  for (int pass = 0; pass < num_passes; ++pass) {
    const PairRows<kGroups> rows(args, span, pass * 8 * kGroups);
    // With one group, x of a block waits in registers. A k step's part is replaced by that of the
    // next block right after its use. Beyond K, x is zero. K is a multiple of 8.
    constexpr int kSteps = kPackedK / 16;
    uint32_t of_x[kGroups == 1 ? kSteps : 1][2];
    const auto load_x = [&](uint32_t (&to)[2], int group, int k_block, int step) {
      const int k = k_block * kPackedK + step * 16;
      const T* from = x + rows.rows[group] + k + 2 * q;
      to[0] = k < args.k ? *reinterpret_cast<const uint32_t*>(from) : uint32_t{0};
      to[1] = k + 8 < args.k ? *reinterpret_cast<const uint32_t*>(from + 8) : uint32_t{0};
    };
    // x of the block to be loaded, if it has 128 k; else bytes of W, which are not used.
    [[maybe_unused]] const T* x_at = nullptr;
    [[maybe_unused]] const T* const unused_x = reinterpret_cast<const T*>(args.w);
    [[maybe_unused]] const auto load_next_x = [&](uint32_t (&to)[2], int step) {
      to[0] = *reinterpret_cast<const uint32_t*>(x_at + step * 16);
      to[1] = *reinterpret_cast<const uint32_t*>(x_at + step * 16 + 8);
    };
    const auto lies_in_x = [&](int k_block) { return (k_block + 1) * kPackedK <= args.k; };
    const auto load_checked = [&](int k_block) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_x(of_x[step], 0, k_block, step);
    };
    if constexpr (kGroups == 1) {
      x_at = x + rows.rows[0] + first_k_block * kPackedK + 2 * q;
      if (lies_in_x(first_k_block)) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_next_x(of_x[step], step);
      } else {
        load_checked(first_k_block);
      }
    }
    if (stays) stage = 0;
    float sums[2][kGroups][4] = {};
    [[maybe_unused]] float all_sums[2][kGroups][4] = {};  // of the splits before, if kWhole
    [[maybe_unused]] BlockOrder next = first_of_all;      // the block after the current, if kWhole

    // Main loop over this warp's k blocks.
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      [[maybe_unused]] const int k_block = first_k_block - block * splits;
      const bool ends_split = kWhole && next.ends_split();
      [[maybe_unused]] const bool has_next = block + 1 < num_blocks;
      [[maybe_unused]] bool is_checked = false;  // the next block ends beyond K
      if constexpr (kWhole) {
        next.advance();
        is_checked = has_next && !lies_in_x(next.at);
        x_at = has_next && !is_checked ? x + rows.rows[0] + next.at * kPackedK + 2 * q : unused_x;
      } else if constexpr (kGroups == 1) {
        x_at = has_next ? x_at - splits * kPackedK : unused_x;
      }
      copies.wait();
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
          if (kGroups > 1 && !rows.has(group)) continue;
          uint32_t (&b)[2] = of_x[kGroups == 1 ? step : 0];
          if constexpr (kGroups > 1) load_x(b, group, k_block, step);
#pragma unroll
          for (int t = 0; t < 2; ++t) ptx::mma_16x8x16<T>(part[t][group], a[t], b[0], b[1]);
          if constexpr (kHasMinimum<Unpacker>) {
            ptx::mma_16x8x16<T>(x_sums.of[group], ones, b[0], b[1]);
          }
          if constexpr (kGroups == 1) load_next_x(b, step);
        }
        if ((step + 1) % Unpacker::kScaleSteps != 0) continue;
        add_scaled<Unpacker, T, kGroups>(sums, part, x_sums, from.extra, g, k_group,
                                         all.scale_form);
      }
      copies.load_next();
      if (++stage == all.stages) stage = 0;
      if constexpr (kWhole) {
        if (is_checked) load_checked(next.at);
        if (ends_split) add_split(all_sums, sums);
      }
    }
    if constexpr (kWhole) {
      store_tile<T>(args, rows, all_sums[0][0], all_sums[1][0], tile, bias + warp * kTileRows);
    } else {
      store_pairs<T, kGroups>(args, rows, sums, partial, bias);
    }
  }
}

// 2^n warps share K: at most 8, with 1.5 k blocks each on average.
int split_bits_of(int64_t k_blocks) {
  int bits = 0;
  while (kWarps >> bits > 1 && k_blocks >= int64_t{3} << bits) ++bits;
  return bits;
}

// Whether CTAs of whole tiles keep all SMs busy. `grid`: of these CTAs.
bool has_whole_tiles(const Context& ctx, const dim3& grid) {
  return static_cast<int>(2 * grid.x * grid.y) >= 3 * ctx.sm_count;
}

}  // namespace

// ---- launchers

// Graph-safe; reads the experts' pairs from the device.
void packed_expert_gemm(const Context& ctx, const PackedExpertGemmParams& p) {
  check_packed_expert_gemm(p);
  if (p.rows.y.size(0) == 0) return;
  CHECK(is_aligned16(p.w.blocks), "packed_expert_gemm: W is not aligned to 16 bytes");
  const int split_bits = split_bits_of(p.w.k_blocks());
  const bool few = p.rows.y.size(0) / p.rows.routing.top_k <= kMaxRows;
  const bool whole = few && has_whole_tiles(ctx, expert_grid(p.rows, p.w.n, 0));
  const int cta_split_bits = whole ? 0 : split_bits;
  PackedExpertArgs args{.expert = expert_args("packed_expert_gemm", p.rows, p.w.n, cta_split_bits,
                                              p.w.gated, few ? 8 : 32),
                        .k_blocks = static_cast<int>(p.w.k_blocks()),
                        .block_bytes = static_cast<int>(p.w.block_bytes()),
                        .stages = 0,
                        .order_bits = split_bits,
                        .scale_form = scale_form(p.w.layout)};
  args.expert.w = static_cast<const char*>(p.w.blocks);
  args.expert.stride = p.stride;
  if (whole) args.expert.partial_pairs = 0;
  const dim3 grid = expert_grid(p.rows, p.w.n, cta_split_bits);
  dispatch_half(p.rows.x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto groups, auto is_whole) {
      constexpr int kGroups = decltype(groups)::value;
      constexpr bool kWhole = decltype(is_whole)::value;
      const auto with = [&](auto unpacker) {
        using Unpacker = decltype(unpacker);
        constexpr int kMost = kStages<Unpacker, kGroups, kWhole>;
        constexpr int kBytes = kWarps * sizeof(Stage<Unpacker>);
        const auto kernel = packed_expert_gemm_kernel<T, kGroups, Unpacker, kWhole>;
        args.expert.alpha = 1 / Unpacker::template kFactor<T>;
        const int blocks_of_warp = (args.k_blocks + (1 << cta_split_bits) - 1) >> cta_split_bits;
        args.stages = std::min(kMost, blocks_of_warp);
        constexpr int kBiasBytes = kWarps * kTileRows * sizeof(T);
        constexpr int kPartialBytes = kWhole ? 0 : partial_bytes(8 * kGroups);
        allow_shared_bytes(kernel, kMost * kBytes + kPartialBytes + kBiasBytes);
        const int bytes = args.stages * kBytes + partial_bytes(args.expert.partial_pairs) +
                          (args.expert.bias == nullptr ? 0 : kBiasBytes);
        launch(ctx, kernel, grid, dim3(kThreads), bytes, args);
      };
      if (p.w.layout.codes == Codes::kE2m1 && p.w.layout.group == 32) return with(E2m1By32{});
      dispatch_unpacker(p.w.layout, with);
    };
    if (whole) return run(IntConstant<1>{}, std::true_type{});
    few ? run(IntConstant<1>{}, std::false_type{}) : run(IntConstant<4>{}, std::false_type{});
  });
}

}  // namespace cpmcu::cuda
