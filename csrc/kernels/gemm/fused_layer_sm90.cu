// Fused layer kernel for Hopper, up to kMaxFusedRows rows: up to four dependent GEMMs of a decoder
// layer (fused_layer.h), y_i = alpha_i * x_i W_i^T + beta_i * y_i. The kernel also computes the
// norms between them, the combination of attention splits before them, and RoPE with the KV write
// after them.
//
// Roofline: all W are read once. A layer of MiniCPM4-8B takes 41 us (4 bits) or 155 us (16 bits) at
// 3 TB/s. As separate launches the GEMMs take 50 and 207 us at one row. Memory is then idle while a
// launch ends, the next one begins and its x arrives.
//
// Schedule: one persistent CTA per SM.
//   producer thread 0 | W tiles of GEMM 0, 1, 2, 3 -> pipeline stages; never waits for x
//   producer thread 1 | waits for the grid barrier of GEMM i, then x tiles -> the same stages
//   prefetch warp     | one row only: W tiles further ahead -> L2 (prefetch.cuh)
//   8 consumer warps  | mma over K -> partial sums to global memory -> sum of the slices in order
//                     | -> epilogue -> arrive at the grid barrier of GEMM i + 1
// A GEMM has tiles of 256 rows of W. If there are fewer tiles than CTAs, K is cut into slices. The
// order of additions depends on N and K only, so a row has the same bits whatever the batch.
//
// The surprising decision: a grid barrier replaces the launch between two GEMMs. It costs as much
// as a launch, but weights keep loading during it. When x arrives, the pipeline is full.
//
// Partial sums: each 16-byte fragment is its own ready flag. The buffer holds NaNs that no
// instruction produces (kNotReady). The receiver polls until none is left, adds, and restores them;
// there is no fence and no counter. For more than 16 rows there are too many fragments to poll, so
// CTAs count arrivals instead.
// Norms: the epilogue of y also writes y * norm_weight, and adds y^2 to an integer sum, whose order
// does not matter. The next GEMM reads y * norm_weight and divides its sums by the root mean
// square. RoPE, up to 16 rows: an epilogue tile holds both elements of each rotated pair.
//
// Code outside the main loop runs once or a few times in a launch, from a cold instruction cache at
// two to three cycles an instruction. So loads that do not need x are issued before x arrives.
//
// Length of fused_layer_kernel: the loop over GEMMs and tiles shares its scalars with the main
// loop, the wait for other slices and the epilogue. As separate functions, these three would change
// machine code that has been tuned by measurement.
#include "kernels/gemm/fused_layer.h"

#include "core/trace.cuh"
#include "kernels/gemm/fused_layer/combine.cuh"
#include "kernels/gemm/fused_layer/epilogue.cuh"
#include "kernels/gemm/fused_layer/mainloops.cuh"
#include "kernels/gemm/fused_layer/prefetch.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

using namespace fused;

TRACED_FILE("fused_layer");

// Producer warps: one for weights, one for x, one for the L2 prefetch. Above 8 rows, the consumers
// need more registers than an equal share, so a whole warpgroup gives up registers.
template <int kGroups>
constexpr int kProducerWarps = kGroups >= 2 ? 4 : 3;

// For more than 16 rows a layer was up to 4 us slower than with a separate launch of rotary_kv.
constexpr int kMaxRotatedGroups = 2;

// Initialises the barriers of the CTA. All warps share the work: a barrier costs 30 to 40 cycles.
template <typename Mainloop>
__device__ __forceinline__ void init_barriers(const Ring<Mainloop>& ring, int warp,
                                              int* num_loaded) {
  using Ring = Ring<Mainloop>;
  if (ptx::is_elected()) {
#pragma unroll 1
    for (int i = warp; i < Ring::kStages; i += kWarps + kProducerWarps<Mainloop::kGroups>) {
      const Stage mine = ring.stage(i);
      ptx::mbarrier_init(ring.weights_in(mine), 1);
      ptx::mbarrier_init(ring.rows_in(mine), 1);
      ptx::mbarrier_init(ring.done(mine), kThreads);
    }
    if (warp < kMaxFusedGemms) ptx::mbarrier_init(ring.x_in(warp), 1);
    if (warp == kWarps - 1) {
      *num_loaded = 0;
      ptx::mbarrier_init(ring.combined(), kWarps);
      ptx::mbarrier_init(ring.bases_read(), 1);
    }
    ptx::mbarrier_init_fence();
  }
}

// The producer warps.
template <typename Mainloop>
__device__ __forceinline__ void produce(const FusedLayerArgs& args, const Ring<Mainloop>& ring,
                                        int warp, int* num_loaded) {
  if (threadIdx.x == kThreads) {
    produce_weights(args, ring, num_loaded);
  } else if (threadIdx.x == kThreads + 32) {
    produce_rows(args, ring);
  } else {
    if constexpr (Mainloop::kPrefetchBlocks > 0) {
      if (warp == kWarps + 2 && args.prefetch_cycles > 0) {
        prefetch_weights<Mainloop>(args, num_loaded);
      }
    }
    ptx::pdl_wait();
  }
}

// A CTA without a part in GEMM i arrives at its grid barrier at once.
template <typename Mainloop>
__device__ __forceinline__ void arrive_without_part(const FusedLayerArgs& args,
                                                    const Ring<Mainloop>& ring,
                                                    uint32_t& launch_parity) {
  if (static_cast<int>(blockIdx.x) >= args.min_active_ctas) {
    ptx::opaque(launch_parity);  // all warps read it before CTA 0 may change it
    ptx::named_barrier<1, kThreads>();
    ptx::mbarrier_wait(ring.bases_read(), 0);
    for (int i = 0; i + 1 < args.num_gemms && threadIdx.x == 0; ++i) {
      if (static_cast<int>(blockIdx.x) >= args.gemms[i].active_ctas) {
        ptx::add_release(args.state->arrived[i + 1]);
      }
    }
  }
}

// Stores the partial sums of a warp tile for the CTA that adds its slices. A slice has kFragments
// fragments of 16 bytes.
template <int kFragments, int kGroups>
__device__ __forceinline__ void send_sums(const float (&sums)[2][kGroups][4], char* fragments,
                                          int slice, int warp, int q2, int m) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group * 8 + q2 < m) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        ptx::store_relaxed16(
            fragments + (slice * kFragments + ((warp * kGroups + group) * 2 + t) * 32) * 16,
            sums[t][group]);
      }
    }
  }
}

template <typename Mainloop>
__global__ void __launch_bounds__(kThreads + 32 * kProducerWarps<Mainloop::kGroups>, 1)
    fused_layer_kernel(
        const __grid_constant__ FusedLayerArgs args,
        const __grid_constant__ AttentionArgs<typename Mainloop::Element> attention) {
  using T = typename Mainloop::Element;
  using Ring = Ring<Mainloop>;
  constexpr int kGroups = Mainloop::kGroups;
  constexpr bool kCountsArrivals = kGroups > kMaxFlaggedGroups;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) uint64_t barriers[Ring::kBarriers];
  __shared__ float row_scales[8 * kGroups];
  __shared__ int num_loaded;
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;
  Ring ring{ptx::shared_address(shared), ptx::shared_address(barriers)};
  ptx::opaque(ring.data);  // so it is computed once
  ptx::opaque(ring.barriers);
  Stage stage = ring.stage(0);

  Trace trace;

  ptx::pdl_launch();
  init_barriers(ring, warp, &num_loaded);
  __syncthreads();
  if (warp >= kWarps) {
    if constexpr (kProducerWarps<kGroups> == 4) ptx::give_registers<kProducerRegisters>();
    produce(args, ring, warp, &num_loaded);
    return;
  }
  if constexpr (kProducerWarps<kGroups> == 4) ptx::take_registers<kConsumerRegisters>();
  if (args.combine_mode == CombineMode::kGridWide) {
    args.head_dim == 64 ? combine_rows<2>(args, attention, ring.combined())
                        : combine_rows<4>(args, attention, ring.combined());
  }
  if constexpr (Mainloop::kCombinesSlice) {
    if (args.combine_mode == CombineMode::kPerCtaSlice &&
        static_cast<int>(blockIdx.x) < args.gemms[0].active_ctas) {
      combine_slice(shared, ring, args, attention);
    }
  }
  ptx::pdl_wait();
  trace.stamp(1);
  uint32_t launch_parity = __ldcg(&args.state->launches) % 2;
  arrive_without_part(args, ring, launch_parity);
  if (blockIdx.x == 0) {
    ExactSum* next = args.state->squares[launch_parity ^ 1][0];
#pragma unroll 1
    for (int i = threadIdx.x; i < kMaxFusedGemms * kMaxFusedRows; i += kThreads) next[i] = {0, 0};
  }

  const int g = lane / 4, q2 = lane % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < args.num_gemms; ++i) {
    const GemmArgs& gemm = args.gemms[i];
    if (static_cast<int>(blockIdx.x) >= gemm.active_ctas) continue;
    const CtaRange range(gemm);
    const Mainloop mainloop(gemm);
    T* const y = static_cast<T*>(gemm.y);
    const bool alone = gemm.slices == 1 && gemm.gated;  // no slices to add: the sums are final
    const bool rotated = kGroups <= kMaxRotatedGroups && gemm.rope_pair_stride > 1;
    // The warp tiles (32 rows of W each) whose slices this CTA adds.
    const int slice = range.slice;
    const int first_warp_tile = gemm.over_slices(kWarps * slice + gemm.slices - 1);
    const int num_epilogue_tiles =
        (gemm.over_slices(kWarps * (slice + 1) + gemm.slices - 1) - first_warp_tile) * kGroups;
#pragma unroll 1
    for (int tile = range.tile; tile < gemm.tiles; tile += gridDim.x) {
      const int n0 = tile * kPackedRows;
      EpilogueTiles<T, kGroups> epilogue{args, gemm, y, n0, first_warp_tile, rotated, g, q2};
      if (rotated && warp < num_epilogue_tiles) epilogue.load_rotations(warp);
      if (kGroups < 8 && !alone && warp < num_epilogue_tiles) epilogue.load_weights(warp);
      // Wait for x. Once it is here, all GEMMs before are complete.
      ptx::mbarrier_wait(ring.rows_in(stage), stage.parity);
      if (threadIdx.x == 0 && tile == range.tile) {
        ptx::mbarrier_arrive(ring.x_in(i));
        trace.stamp(3 * i + 2);
      }
      // The value of the counter once all slices have arrived; read before this CTA adds its own.
      [[maybe_unused]] uint32_t all_summed = 0;
      if (kCountsArrivals && gemm.slices > 1 && threadIdx.x == 0) {
        all_summed = (__ldcg(args.state->summed[i][tile]) / kSummed + 1) * kSummed;
      }
      ExactSum squares_of_x{};
      const auto prefetch = [&] {
        if (gemm.inv_size != 0 && threadIdx.x < args.m) {
          const ExactSum& sum = args.state->squares[launch_parity][i - 1][threadIdx.x];
          squares_of_x = {__ldcg(&sum.high), __ldcg(&sum.low)};
        }
        if (!alone && warp < num_epilogue_tiles) epilogue.load_old(warp);
      };
      if constexpr (kGroups < 8) prefetch();  // with 8 groups, registers are too few

      // Main loop over this CTA's k blocks of the tile.
      float sums[2][kGroups][4] = {};
      ptx::mbarrier_wait(ring.weights_in(stage), stage.parity);
      for (int left = range.end - range.begin;;) {
        const Stage current = stage;
        ring.advance(stage);
        bool has_rows, has_weights;
        const auto poll = [&] {
          // Do not poll for the next GEMM: a poll may suspend the warp.
          const bool polls = left > 1;
          has_rows = ptx::mbarrier_try_wait(ring.rows_in(stage), stage.parity, polls);
          has_weights = ptx::mbarrier_try_wait(ring.weights_in(stage), stage.parity, polls);
        };
        // Every lane arrives. That costs no more than one arrival of the warp, and
        // compute-sanitizer's racecheck understands it.
        const auto release = [&] { ptx::mbarrier_arrive(ring.done(current)); };
        mainloop.accumulate_block(sums, current.rows, current.weights, poll, release);
        if (--left == 0) break;
        ptx::mbarrier_wait(ring.rows_in(stage), stage.parity, has_rows);
        ptx::mbarrier_wait(ring.weights_in(stage), stage.parity, has_weights);
      }

      trace.stamp(3 * i + 3);
      if constexpr (kGroups >= 8) {
        prefetch();
        if (!alone && warp < num_epilogue_tiles) epilogue.load_weights(warp);
      }
      // Scales: alpha, and the norm of x.
      if (threadIdx.x < 8 * kGroups) {
        float scale = gemm.alpha;
        if (gemm.inv_size != 0) {
          scale *= rsqrtf(squares_of_x.value() * gemm.inv_size + gemm.eps);
        }
        row_scales[threadIdx.x] = scale;
      }
      if (alone && n0 + kPackedRows <= gemm.n) {
        ptx::named_barrier<1, kThreads>();
        store_gated<T>(gemm, y, sums, row_scales, args.m, n0 + warp * 32 + g, g, q2);
        ptx::named_barrier<1, kThreads>();
        continue;
      }

      // Partial sums go to the CTA that owns their warp tile, even if it is this one.
      constexpr int kFragments = kWarps * kGroups * 2 * 32;  // of a CTA
      const int first_cta = gemm.slices == 1 ? blockIdx.x : blockIdx.x - slice;
      char* const fragments = args.fragments + (int64_t{first_cta} * kFragments + lane) * 16;
      send_sums<kFragments>(sums, fragments, slice, warp, q2, args.m);
      ptx::named_barrier<1, kThreads>();  // row_scales are complete
      if (kCountsArrivals && gemm.slices > 1) {
        if (threadIdx.x == 0) {
          uint32_t* const summed = args.state->summed[i][tile];
          ptx::add_release(summed, slice == 0 ? kSummed - gemm.slices + 1 : 1);
          while (static_cast<int>(ptx::load_acquire(summed) - all_summed) < 0) {
          }
        }
        ptx::named_barrier<1, kThreads>();
      }
      // Epilogue: one tile a warp.
#pragma unroll 1
      for (int epilogue_tile = warp; epilogue_tile < num_epilogue_tiles; epilogue_tile += kWarps) {
        if (kGroups > 1 && epilogue_tile != warp) {
          epilogue.load_weights(epilogue_tile), epilogue.load_old(epilogue_tile);
        }
        const auto place = epilogue.place_of(epilogue_tile);
        float sum[2][4] = {};
        epilogue.template add_slices<kCountsArrivals>(sum, place, fragments, kFragments);
        __syncwarp();
        if (rotated) {
          epilogue.store_rotated(place, sum, row_scales);
          continue;
        }
        float squares[2] = {};
        epilogue.store(place, sum, row_scales, squares);
        if (gemm.normed == nullptr) continue;
        epilogue.add_squares(place.row, squares, args.state->squares[launch_parity][i]);
      }
      ptx::named_barrier<1, kThreads>();
    }
    trace.stamp(3 * i + 4);
    if (i + 1 < args.num_gemms && threadIdx.x == 0) {
      ptx::add_release(args.state->arrived[i + 1]);
    }
  }
  trace.end();
  if (Mainloop::kPrefetchBlocks > 0 && threadIdx.x == 0) atomicAdd(&num_loaded, kNoMoreLoads);
  // CTA 0 works on every GEMM, so it has waited at all grid barriers. Therefore all CTAs have
  // arrived there. They read `bases` and `launches` before they arrived.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (args.combine_mode == CombineMode::kGridWide) args.state->bases[0] += gridDim.x;
    for (int i = 1; i < args.num_gemms; ++i) args.state->bases[i] += gridDim.x;
    if (args.num_gemms > 1) ++args.state->launches;
  }
}

// Cuts K into as many slices as there are CTAs for.
void divide_work(WeightBlocks& of, int n, int num_ctas) {
  of.tiles = (n + kPackedRows - 1) / kPackedRows;
  of.slices = std::clamp(num_ctas / of.tiles, 1, std::min(kWarps, of.k_blocks));
  of.slice_blocks = of.k_blocks / of.slices;
  of.longer_slices = of.k_blocks % of.slices;
  of.one_over_slices = (1 << 16) / of.slices + 1;
  of.active_ctas = std::min(of.tiles * of.slices, num_ctas);
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
                        const Tensor& x, const Tensor& normed, int groups, int num_ctas) {
  const int k = static_cast<int>(x.size(1)), n = static_cast<int>(from.stored_rows());
  GemmArgs gemm{.x_map = make_map(x.data(), static_cast<int>(x.size(0)), k, x.dtype(), 8 * groups),
                .y = y.data(),
                .normed = normed.empty() ? nullptr : normed.data(),
                .norm_weight = normed.empty() ? nullptr : from.norm_weight.data(),
                .bias = from.bias.data(),
                .norm_offset = from.norm_offset,
                .alpha = from.alpha,
                .beta = from.beta,
                .n = n,
                .gated = from.is_gated()};
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

bool has_4_bits(const FusedGemm& gemm) {
  return !gemm.is_dense() && gemm.packed.layout.bits() == 4;
}
int64_t most_fused_rows(const FusedGemm& gemm) {
  return has_4_bits(gemm) && is_common(gemm.packed.layout) ? kMaxFusedRows : kMaxRows;
}
int fused_row_groups(const FusedGemm& gemm, int64_t rows) {
  const int64_t most = most_fused_rows(gemm);
  return gemm.is_dense() ? row_groups(rows, most) : row_groups_of(gemm.packed.layout, rows, most);
}

CombineMode combine_mode_of(const FusedLayerParams& p, const GemmArgs& first, int num_ctas) {
  const int rows = p.attention.tokens.num_tokens, count = num_splits(p.attention.tokens.max_kv);
  if (rows == 0 || count == 1) return CombineMode::kNone;
  const bool is_short = count <= kMaxCombinedSplits;
  // NOTE: kPerCtaSlice is not valid for two GEMMs. A CTA could then arrive before its producer
  // thread has read `bases`, which CTA 0 changes at the end.
  if (rows == 1 && is_short && has_4_bits(p.gemms.front()) && p.gemms.size() != 2 &&
      first.tiles <= num_ctas &&
      first.slice_blocks + (first.longer_slices > 0) <= kMaxCombinedKBlocks) {
    return CombineMode::kPerCtaSlice;
  }
  // A warp goes through all splits of a head. If there are many splits, most warps must have work.
  const bool is_busy = rows * p.attention.num_heads >= num_ctas * kWarps / 2;
  return is_short || is_busy ? CombineMode::kGridWide : CombineMode::kNone;
}

template <typename Mainloop>
void launch_fused_layer(const Context& ctx, FusedLayerArgs args, const AttentionParams& attention,
                        int num_ctas) {
  using Ring = Ring<Mainloop>;
  const auto kernel = fused_layer_kernel<Mainloop>;
  static_assert(Mainloop::kInFlight < Ring::kStages, "every load in flight has its own stage");
  static_assert(!Mainloop::kCombinesSlice || kMaxCombinedKBlocks <= Ring::kStages);
  for (GemmArgs& gemm : args.gemms) gemm.alpha /= Mainloop::kScale;
  allow_shared_bytes(kernel, Ring::kBytes);
  launch(ctx, kernel, dim3(num_ctas), dim3(kThreads + 32 * kProducerWarps<Mainloop::kGroups>),
         Ring::kBytes, args, make_decode_args<typename Mainloop::Element>(ctx, attention));
}

}  // namespace

void fused_layer_prepare_sm90(const Context& ctx, const Tensor& memory) {
  fill_bytes(ctx.device, memory.data(), 0xFF, memory.num_bytes(), ctx.stream);
  fill_bytes(ctx.device, memory.data(), 0, kFusedStateBytes, ctx.stream);
}

void fused_layer_sm90(const Context& ctx, const FusedLayerParams& p) {
  const int64_t num_rows = p.gemms.front().x.size(0);
  const bool has_attention = !p.attention.out.empty(), has_rotary = !p.rotary.qkv.empty();
  const int64_t num_bytes = fused_layer_bytes(num_rows);
  CHECK(p.memory.num_bytes() >= num_bytes,
        "fused_layer: {} bytes of memory, expected {} for {} rows", p.memory.num_bytes(), num_bytes,
        num_rows);
  const int num_ctas = std::min(ctx.sm_count, kMaxFusedCtas);
  if (has_rotary) check_rotary_kv(p.rotary);
  bool rotates = false;
  const int64_t most_rows = most_fused_rows(p.gemms.front());
  for (int64_t row = 0; row < num_rows; row += most_rows) {
    const int64_t m = std::min(most_rows, num_rows - row);
    const int groups = fused_row_groups(p.gemms.front(), m);
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
      args.gemms[i] = make_gemm_args(gemm, i > 0 ? &p.gemms[i - 1] : nullptr, gemm.y.rows(row, m),
                                     gemm.x.rows(row, m), normed, groups, num_ctas);
      if (i + 1 < p.gemms.size())
        args.min_active_ctas = std::min(args.min_active_ctas, args.gemms[i].active_ctas);
    }
    if (has_attention && row == 0) {
      args.combine_mode = combine_mode_of(p, args.gemms[0], num_ctas);
      args.max_splits = num_splits(p.attention.tokens.max_kv);
      args.head_dim = p.attention.head_dim;
      if (args.combine_mode == CombineMode::kNone)
        attention_combine_before_fused_layer(ctx, p.attention);
    }
    GemmArgs& last = args.gemms[p.gemms.size() - 1];
    // RoPE is fused only if a warp has at most one epilogue tile. The positions and KV entries of
    // that tile are loaded before x arrives.
    rotates = has_rotary && num_rows <= 8 * kMaxRotatedGroups && (groups == 1 || last.slices > 1);
    if (rotates) {
      args.rotary = make_rotary(p.rotary);
      last.rope_pair_stride = p.rotary.head_dim / 32;
    }
    dispatch_half(p.gemms.front().x.dtype(), [&](auto t) {
      using T = decltype(t);
      dispatch_int<1, 2, 4, 8, 16>("groups of rows", groups, [&](auto constant) {
        constexpr int kGroups = decltype(constant)::value;
        using Mma = std::conditional_t<kGroups <= 2, MmaSync, WgmmaOf<(kGroups >= 8 ? 1 : 2)>>;
        if (!p.gemms.front().is_dense()) {
          dispatch_unpacker(p.gemms.front().packed.layout, [&](auto unpacker) {
            using Unpacker = decltype(unpacker);
            constexpr bool kFits = kIsFused<Unpacker> && (kGroups <= 8 || Unpacker::kBits == 4);
            if constexpr (kFits && kHasRows<Unpacker, kGroups>) {
              launch_fused_layer<PackedMainloop<Mma, T, kGroups, Unpacker>>(ctx, args, p.attention,
                                                                            num_ctas);
            }
          });
        } else if constexpr (kGroups <= 8) {
          launch_fused_layer<DenseMainloop<T, kGroups>>(ctx, args, p.attention, num_ctas);
        }
      });
    });
  }
  if (has_rotary && !rotates) cuda::rotary_kv(ctx, p.rotary);
}

}  // namespace cpmcu::cuda
