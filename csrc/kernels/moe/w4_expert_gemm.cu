// w4_expert_gemm: y[p] = x[row of p] W[expert of p]^T with 4-bit W in weight blocks (w4a16.h).
//
// Roofline: the W of each chosen expert is read once, N K / 2 bytes and 3 % of scales. One token of
// a 30B-A3B layer has 8 experts: gate and up 13 MB, 4.2 us at 3 TB/s; down half of it.
//
// Schedule: a CTA owns 32 rows of W of one expert with pairs, a warp tile of the weight blocks.
//   8 warps   warp w takes k blocks w, w + 8, ... of 128 k: 16 bytes of q a lane and load, straight
//             from memory; unpacks exact integers, mma over 128 k, scale in float32
//   epilogue  expert_tiles.cuh
// More than 64 pairs read W again, from L2. A pair has the same bits in any company.
//
// The surprising decision: rows of x do not pass through shared memory. An expert has few pairs in
// a decode step, and their rows come from L1 in words of 4 bytes, which is what an mma fragment
// needs.
#include "core/ptx.cuh"
#include "kernels/gemm/w4a16_multiply.cuh"
#include "kernels/moe/expert_tiles.cuh"

namespace cpmcu::cuda {
namespace {

struct W4Args {
  ExpertArgs expert;
  int k_blocks, block_bytes;
  bool bf16_scales;
};

// A lane's part of 32 rows x 128 k: q of four pairs of k steps, and scales and zero points of rows
// g, g + 8, g + 16, g + 24.
struct BlockFragment {
  uint4 words[4];
  uint16_t scales[4];
  uint8_t zeros[4];
};

__device__ __forceinline__ float scale_of(uint16_t bits, bool bf16) {
  return bf16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
}

// ---- kernels

template <typename T,   // __half or __nv_bfloat16
          int kGroups,  // groups of 8 pairs at a time
          bool kZeros,  // W has zero points
          int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    w4_expert_gemm_kernel(const __grid_constant__ W4Args all) {
  const ExpertArgs& args = all.expert;
  ptx::pdl_launch();
  ptx::pdl_wait();  // the experts are the result of an earlier kernel
  if (static_cast<int>(blockIdx.y) >= *args.num_active) return;
  const int expert = args.active[blockIdx.y];
  const int end = args.offsets[expert + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tile = blockIdx.x % kWarpTiles;  // warp tile of the weight blocks
  const char* blocks =
      args.w + expert * args.stride +
      static_cast<int64_t>(blockIdx.x / kWarpTiles) * all.k_blocks * all.block_bytes;
  const uint64_t policy = ptx::evict_first_policy();

  const auto fetch = [&](BlockFragment& to, int k_block) {
    const char* block = blocks + static_cast<int64_t>(k_block) * all.block_bytes;
    const char* words = block + tile * kWarpTileBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.words[i] = ptx::load_stream16(words + i * kPairBytes, policy);
    const int row = tile * kWarpTileRows + g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to.scales[i] = __ldg(reinterpret_cast<const uint16_t*>(block + kScaleOffset) + row + 8 * i);
      if constexpr (kZeros) {
        to.zeros[i] = __ldg(reinterpret_cast<const uint8_t*>(block + kZeroOffset) + row + 8 * i);
      }
    }
  };

  for (int first = args.offsets[expert]; first < end; first += 8 * kGroups) {
    const PairRows<T, kGroups> rows(args, first, end);
    const T* x = static_cast<const T*>(args.x);
    float sums[2][kGroups][4] = {};
    BlockFragment next;
    if (warp < all.k_blocks) fetch(next, warp);
    // Main loop over this warp's k blocks.
    for (int k_block = warp; k_block < all.k_blocks; k_block += kWarps) {
      const BlockFragment block = next;
      if (k_block + kWarps < all.k_blocks) fetch(next, k_block + kWarps);
      uint32_t low[2] = {low_offset<T>(8), low_offset<T>(8)};
      uint32_t high[2] = {high_offset<T>(8, 8), high_offset<T>(8, 8)};
      if constexpr (kZeros) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          low[t] = low_offset<T>(block.zeros[2 * t]);
          high[t] = high_offset<T>(block.zeros[2 * t + 1], block.zeros[2 * t]);
        }
      }
      float part[2][kGroups][4] = {};
#pragma unroll
      for (int step = 0; step < kW4BlockK / 16; ++step) {
        uint32_t a[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          unpack<T>(a[t], word_of(block.words[step / 2], step % 2, t), low[t], high[t]);
        }
        // Beyond K, x is zero. K is a multiple of 8.
        const int k = k_block * kW4BlockK + step * 16;
        const bool has_low = k < args.k, has_high = k + 8 < args.k;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (!rows.has(group)) continue;
          const T* from = x + rows.rows[group] + k + 2 * q;
          const bool valid = rows.rows[group] >= 0;
          const uint32_t b0 =
              valid && has_low ? *reinterpret_cast<const uint32_t*>(from) : uint32_t{0};
          const uint32_t b1 =
              valid && has_high ? *reinterpret_cast<const uint32_t*>(from + 8) : uint32_t{0};
#pragma unroll
          for (int t = 0; t < 2; ++t) ptx::mma_16x8x16<T>(part[t][group], a[t], b0, b1);
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = scale_of(block.scales[2 * t + i / 2], all.bf16_scales);
            sums[t][group][i] = __fmaf_rn(scale, part[t][group][i], sums[t][group][i]);
          }
        }
      }
    }
    store_pairs<T>(args, rows, sums);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads the experts' pairs from the device.
void w4_expert_gemm(const Context& ctx, const W4ExpertGemmParams& p) {
  check_w4_expert_gemm(p);
  if (p.rows.y.size(0) == 0) return;
  CHECK(is_aligned16(p.w.blocks), "w4_expert_gemm: W is not aligned to 16 bytes");
  W4Args args{.expert = expert_args("w4_expert_gemm", p.rows, p.w.n, p.w.gated),
              .k_blocks = static_cast<int>(p.w.k_blocks()),
              .block_bytes = static_cast<int>(p.w.block_bytes()),
              .bf16_scales = p.w.scale_dtype == DType::kBF16};
  args.expert.w = static_cast<const char*>(p.w.blocks);
  args.expert.stride = p.stride;
  const dim3 grid = expert_grid(p.rows, p.w.n);
  dispatch_half(p.rows.x.dtype(), [&](auto t) {
    using T = decltype(t);
    args.expert.alpha = 1 / kUnpackedScale<T>;
    dispatch_groups(p.rows, [&](auto groups) {
      constexpr int kGroups = decltype(groups)::value, kMinBlocks = kGroups <= 2 ? 2 : 1;
      const auto kernel = p.w.zero_points ? w4_expert_gemm_kernel<T, kGroups, true, kMinBlocks>
                                          : w4_expert_gemm_kernel<T, kGroups, false, kMinBlocks>;
      launch(ctx, kernel, grid, dim3(kThreads), 0, args);
    });
  });
}

}  // namespace cpmcu::cuda
