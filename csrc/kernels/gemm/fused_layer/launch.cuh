// Launches of the fused layer kernel: how the work of each GEMM is divided, and the arguments.
#pragma once

#include <algorithm>
#include <utility>

#include "core/dispatch.h"
#include "core/launch.h"
#include "kernels/gemm/fused_layer/kernel.cuh"
#include "kernels/gemm/tensor_map.cuh"
#include "kernels/ranks/rank_sum.h"

namespace cpmcu::cuda {
namespace {

// Divides K of this number of tiles into slices, as many as the CTAs can take.
void divide_tiles(WeightBlocks& of, int tiles, int num_ctas) {
  of.slices = std::clamp(num_ctas / tiles, 1, std::min(kWarps, of.k_blocks));
  of.slice_blocks = of.k_blocks / of.slices;
  of.longer_slices = of.k_blocks % of.slices;
  of.one_over_slices = (1 << 16) / of.slices + 1;
  of.active_ctas = std::min(tiles * of.slices, num_ctas);
}
void divide_work(WeightBlocks& of, int n, int num_ctas) {
  of.tiles = (n + kPackedRows - 1) / kPackedRows;
  divide_tiles(of, of.tiles, num_ctas);
}

void set_weight_blocks(WeightBlocks& of, const PackedWeight& w, int num_ctas) {
  of.blocks = static_cast<const char*>(w.blocks);
  of.k_blocks = static_cast<int>(w.k_blocks());
  of.block_bytes = static_cast<int>(w.block_bytes());
  divide_work(of, static_cast<int>(w.n), num_ctas);
}

Rotary make_rotary(const RotaryKvParams& from) {
  return {.k_cache = from.k_cache.data(),
          .v_cache = from.v_cache.data(),
          .bias = from.bias.data(),
          .inv_freq = from.inv_freq,
          .attention_scaling = from.attention_scaling,
          .num_heads = from.num_heads,
          .num_kv_heads = from.num_kv_heads,
          .tokens = from.tokens};
}

GemmArgs make_gemm_args(const FusedGemm& from, const FusedGemm* before, const Tensor& y,
                        const Tensor& x, const Tensor& normed, bool has_maps, int groups,
                        int num_ctas) {
  const int k = static_cast<int>(x.size(1)), n = static_cast<int>(from.stored_rows());
  GemmArgs gemm{.x = x.data(),
                .y = y.data(),
                .normed = normed.empty() ? nullptr : normed.data(),
                .norm_weight = normed.empty() ? nullptr : from.norm_weight.data(),
                .bias = from.bias.data(),
                .norm_offset = from.norm_offset,
                .alpha = from.alpha,
                .beta = from.beta,
                .n = n,
                .k = k,
                .gated = from.is_gated()};
  if (has_maps) {
    gemm.x_map = make_map(x.data(), static_cast<int>(x.size(0)), k, x.dtype(), 8 * groups);
  }
  if (from.is_dense()) {
    using Mainloop = DenseMainloop<__half, 1>;
    gemm.w_map = make_map(from.w.data(), n, k, x.dtype(), Mainloop::kBoxRows);
    gemm.k_blocks = (k + Mainloop::kBlockK - 1) / Mainloop::kBlockK;
    divide_work(gemm, n, num_ctas);
  } else {
    set_weight_blocks(gemm, from.packed, num_ctas);
    gemm.scale_form = scale_form(from.packed.layout);
  }
  if (before != nullptr && !before->normed.empty()) {
    gemm.inv_size = 1.0f / static_cast<float>(k);
    gemm.eps = before->norm_eps;
  }
  return gemm;
}

// Adds a GEMM to the launch, as two parts if it is gated and has a rest. The main part of a gated
// GEMM writes y itself, so the fragments of its CTAs are free for the sums of the rest.
void add_gemm(FusedLayerArgs& args, GemmArgs gemm, int num_ctas) {
  const int rest = gemm.tiles % num_ctas, tiles = gemm.tiles;
  const bool has_room = args.num_parts + kMaxFusedGemms - gemm.number < kMaxFusedParts;
  if (gemm.gated && tiles > num_ctas && 0 < rest && 2 * rest <= num_ctas && has_room) {
    gemm.tiles -= rest;
    args.parts[args.num_parts++] = gemm;
    gemm.first_tile = std::exchange(gemm.tiles, tiles);
    gemm.is_rest = true;
    divide_tiles(gemm, rest, num_ctas);
  }
  args.parts[args.num_parts++] = gemm;
}

// Differences between the kernels of the architectures, besides their main loops.
struct FusedTarget {
  bool has_maps;  // tensor maps exist, through which x and 16-bit W are read
  // Maximum rows of a launch with 4-bit W, in layouts that have kernels for many rows.
  int64_t max_rows;
  int max_combined_k_blocks;  // kMaxCombinedKBlocks of the type Copies (mainloops.cuh)
  int max_rotated_groups;     // kMaxRotatedGroups of the type Copies (mainloops.cuh)
};

bool has_4_bits(const FusedGemm& gemm) {
  return !gemm.is_dense() && gemm.packed.layout.bits() == 4;
}
int64_t most_fused_rows(const Context& ctx, const FusedTarget& target, const FusedGemm& gemm) {
  // Two stages must fit. On GeForce GPUs, blocks of int8 leave room for 32 rows.
  const int64_t stage_bytes =
      kMaxRows * kRowBytes + (gemm.is_dense() ? 0 : gemm.packed.block_bytes());
  if (2 * stage_bytes > ring_bytes(ctx)) return kMaxRows / 2;
  return has_4_bits(gemm) && is_common(gemm.packed.layout) ? target.max_rows : kMaxRows;
}
int fused_row_groups(const FusedGemm& gemm, int64_t rows, int64_t most) {
  return gemm.is_dense() ? row_groups(rows, most) : row_groups_of(gemm.packed.layout, rows, most);
}

CombineMode combine_mode_of(const FusedTarget& target, const FusedLayerParams& p,
                            const GemmArgs& first, int num_ctas) {
  const int rows = p.attention.tokens.num_tokens, count = num_splits(p.attention.tokens.max_kv);
  if (rows == 0 || count == 1) return CombineMode::kNone;
  const bool is_short = count <= kMaxCombinedSplits;
  // NOTE: kPerCtaSlice is not valid for two GEMMs. A CTA could then arrive before its producer
  // thread has read `bases`, which CTA 0 changes at the end.
  if (rows == 1 && is_short && has_4_bits(p.gemms.front()) && p.gemms.size() != 2 &&
      first.tiles <= num_ctas && !first.gated &&
      first.slice_blocks + (first.longer_slices > 0) <= target.max_combined_k_blocks) {
    return CombineMode::kPerCtaSlice;
  }
  // A warp goes through all splits of a head. If there are many splits, most warps must have work.
  const bool is_busy = rows * p.attention.num_heads >= num_ctas * kWarps / 2;
  return is_short || is_busy ? CombineMode::kGridWide : CombineMode::kNone;
}

template <typename Mainloop, bool kSumsRanks = false>
void launch_fused_layer(const Context& ctx, FusedLayerArgs args, const AttentionParams& attention,
                        int num_ctas) {
  using Ring = Ring<Mainloop>;
  const auto kernel = fused_layer_kernel<Mainloop, kSumsRanks>;
  static_assert(!Mainloop::kCombinesSlice ||
                Mainloop::Copies::kMaxCombinedKBlocks <= Ring::kMinStages);
  args.num_stages = ring_bytes(ctx) / Ring::kStageBytes;
  CHECK(args.num_stages >= 2, "fused_layer: {} stages, expected room for 2", args.num_stages);
  for (GemmArgs& gemm : args.parts) gemm.alpha /= Mainloop::kScale;
  // More than half of an SM's shared memory: an SM gets one CTA.
  const auto bytes =
      std::max<int64_t>(args.num_stages * Ring::kStageBytes, ctx.sm_shared_bytes / 2 + 1024);
  allow_shared_bytes(kernel, bytes);
  launch(ctx, kernel, dim3(num_ctas), dim3(kThreads + 32 * kProducerWarps<Mainloop>), bytes, args,
         make_decode_args<typename Mainloop::Element>(ctx, attention));
}

// Launches the kernel for the rows of x, and rotary_kv if no launch applies it. `dispatch` gets a
// launch's arguments, groups of rows and CTAs, and calls launch_fused_layer.
template <typename F>
void run_fused_layer(const Context& ctx, const FusedTarget& target, const FusedLayerParams& p,
                     F dispatch) {
  const int64_t num_rows = p.gemms.front().x.size(0);
  const bool has_attention = !p.attention.out.empty(), has_rotary = !p.rotary.qkv.empty();
  const int64_t num_bytes = fused_layer_bytes(num_rows);
  CHECK(p.memory.num_bytes() >= num_bytes,
        "fused_layer: {} bytes of memory, expected {} for {} rows", p.memory.num_bytes(), num_bytes,
        num_rows);
  const int num_ctas = std::min(ctx.sm_count, kMaxFusedCtas);
  if (has_rotary) check_rotary_kv(p.rotary);
  bool rotates = false;
  const int64_t most_rows = most_fused_rows(ctx, target, p.gemms.front());
  for (int64_t row = 0; row < num_rows; row += most_rows) {
    const int64_t m = std::min(most_rows, num_rows - row);
    const int groups = fused_row_groups(p.gemms.front(), m, most_rows);
    FusedLayerArgs args{
        .state = p.memory.as<FusedState>(),
        .fragments = p.memory.as<char>() + kFusedStateBytes +
                     (groups > kMaxFlaggedGroups ? kMaxFlaggedGroups * kFusedSumBytes : 0),
        .num_gemms = static_cast<int>(p.gemms.size()),
        .m = static_cast<int>(m),
        .min_active_ctas = num_ctas,
        .num_following = static_cast<int>(p.following.size()),
        .prefetch_cycles = prefetch_cycles_of(ctx, p)};
    for (size_t i = 0; i < p.following.size(); ++i) {
      set_weight_blocks(args.following[i], p.following[i], num_ctas);
    }
    for (size_t i = 0; i < p.gemms.size(); ++i) {
      const FusedGemm& gemm = p.gemms[i];
      const Tensor normed = gemm.normed.empty() ? Tensor() : gemm.normed.rows(row, m);
      GemmArgs made =
          make_gemm_args(gemm, i > 0 ? &p.gemms[i - 1] : nullptr, gemm.y.rows(row, m),
                         gemm.x.rows(row, m), normed, target.has_maps, groups, num_ctas);
      made.number = static_cast<int>(i);
      if (!gemm.part.empty()) made.rank_sum = static_cast<uint8_t>(++args.num_rank_sums);
      if (i + 1 < p.gemms.size()) {
        args.min_active_ctas = std::min(args.min_active_ctas, made.active_ctas);
      }
      add_gemm(args, made, num_ctas);
    }
    if (args.num_rank_sums > 0) {
      args.exchange = ctx.exchange->in_fused_layers();
      for (const FusedGemm& gemm : p.gemms) {
        const int64_t words = rank_sum_words(m, gemm.part.empty() ? 0 : gemm.y.size(1));
        CHECK(words <= args.exchange.num_words,
              "fused_layer: {} words of a sum over ranks, expected up to {}", words,
              args.exchange.num_words);
      }
    }
    if (has_attention && row == 0) {
      args.combine_mode = combine_mode_of(target, p, args.parts[0], num_ctas);
      args.max_splits = num_splits(p.attention.tokens.max_kv);
      args.head_dim = p.attention.head_dim;
      if (args.combine_mode == CombineMode::kNone)
        attention_combine_before_fused_layer(ctx, p.attention);
    }
    GemmArgs& last = args.parts[args.num_parts - 1];
    // RoPE is fused only if a warp has at most one epilogue tile. The positions and KV entries of
    // that tile are loaded before x arrives.
    const int warp_tiles = (kWarps + last.slices - 1) / last.slices;  // warp tiles of a CTA
    rotates = has_rotary && num_rows <= 8 * target.max_rotated_groups &&
              (groups == 1 || warp_tiles * groups <= kWarps);
    if (rotates) {
      args.rotary = make_rotary(p.rotary);
      last.rope_pair_stride = p.rotary.head_dim / 32;
    }
    dispatch(args, groups, num_ctas);
  }
  if (has_rotary && !rotates) cuda::rotary_kv(ctx, p.rotary);
}

}  // namespace
}  // namespace cpmcu::cuda
